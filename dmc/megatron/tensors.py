"""The Hugging Face weights in each Megatron tensor, how they are fused, and how tensor-parallel ranks share it.

Both sides rotate halves, channel i with i + D/2, so queries and keys keep the order of their rows, and the borrowed
neuron is the last channel of each head here and there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dmc.models.tensor_parallel import check_divides

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


@dataclass(frozen=True)
class Part:
    """One Megatron tensor and the Hugging Face weights in it."""

    name: str
    """Key in a rank's state dict, as Megatron-Core on Transformer Engine names it."""
    weights: tuple[str, ...]
    """Hugging Face names, in the order in which they are fused."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the weights."""
    cut: Literal["rows", "columns", "nowhere"] = "rows"
    """Dimension that tensor-parallel ranks shard; nowhere: each rank holds the whole tensor."""
    blocks: int = 1
    """Blocks in which fused weights alternate: query, key, value one per KV head; gate and up one per rank."""
    padding: int = 0
    """Rows after the weight's own, for divisibility: copies of its last row, as Megatron's converter makes them."""

    def shard_shape(self, tensor_size: int) -> tuple[int, ...]:
        """Return the shape of the shard that one of `tensor_size` ranks holds."""
        rows, *columns = self.shapes[0]
        if self.cut == "rows":
            return ((sum(shape[0] for shape in self.shapes) + self.padding) // tensor_size, *columns)
        return (rows, columns[0] // tensor_size) if self.cut == "columns" else self.shapes[0]

    def join(self, shards: list[Tensor]) -> list[Tensor]:
        """Join the shards, one for each rank, into the weights, in the order of `weights`; the padding is cut off."""
        if self.cut == "nowhere":
            return [shards[0]]
        whole = torch.cat(shards, dim=0 if self.cut == "rows" else 1)
        if len(self.weights) == 1:
            return [whole[: self.shapes[0][0]].contiguous()]
        turns = whole.unflatten(0, (self.blocks, -1))
        rows = [shape[0] // self.blocks for shape in self.shapes]
        return [piece.flatten(0, 1) for piece in turns.split(rows, dim=1)]

    def shard(self, weights: list[Tensor], rank: int, tensor_size: int) -> Tensor:
        """Make the shard of rank `rank` of `tensor_size` out of whole weights; the inverse of `join`."""
        if self.cut == "nowhere":
            return weights[0]
        if self.padding:
            weights = [torch.cat((weight, weight[-1:].expand(self.padding, -1))) for weight in weights]
        own = [weight.chunk(tensor_size, dim=0 if self.cut == "rows" else 1)[rank] for weight in weights]
        if len(own) == 1:
            return own[0].clone(memory_format=torch.contiguous_format)  # torch.save would store a view's whole storage
        turns = self.blocks // tensor_size
        return torch.cat([weight.unflatten(0, (turns, -1)) for weight in own], dim=1).flatten(0, 1)


def parts_of(config: Any, tensor_size: int, padded_vocab_size: int) -> Iterator[Part]:
    """Yield the tensors of a Llama, the embedding first.

    Args:
        config: its Hugging Face configuration.
        tensor_size: tensor-parallel ranks.
        padded_vocab_size: rows of Megatron's embedding, all ranks together.
    Raises:
        ValueError: heads or neurons do not divide by the ranks.
    """
    check_divides(config, tensor_size)
    vocabulary = {
        "shapes": ((config.vocab_size, config.hidden_size),),
        "padding": padded_vocab_size - config.vocab_size,
    }
    norm: dict[str, Any] = {"shapes": ((config.hidden_size,),), "cut": "nowhere"}
    yield Part(EMBEDDING, ("model.embed_tokens.weight",), **vocabulary)
    for index in range(config.num_hidden_layers):
        yield from layer_parts(config, tensor_size, f"decoder.layers.{index}.", f"model.layers.{index}.", norm)
    yield Part("decoder.final_layernorm.weight", ("model.norm.weight",), **norm)
    if not config.tie_word_embeddings:
        yield Part(OUTPUT, ("lm_head.weight",), **vocabulary)


def layer_parts(config: Any, tensor_size: int, megatron: str, prefix: str, norm: dict[str, Any]) -> Iterator[Part]:
    """Yield the tensors of one layer; `megatron` and `prefix` are the prefixes of its names there and here."""
    hidden, neurons, groups = config.hidden_size, config.intermediate_size, config.num_key_value_heads
    queries, keys = config.num_attention_heads * config.head_dim, groups * config.head_dim
    parts: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
        ("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm",), norm),
        (
            "self_attention.linear_qkv.weight",
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            {"shapes": ((queries, hidden), (keys, hidden), (keys, hidden)), "blocks": groups},
        ),
        (
            "self_attention.linear_proj.weight",
            ("self_attn.o_proj",),
            {"shapes": ((hidden, queries),), "cut": "columns"},
        ),
        ("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm",), norm),
        (
            "mlp.linear_fc1.weight",
            ("mlp.gate_proj", "mlp.up_proj"),
            {"shapes": ((neurons, hidden), (neurons, hidden)), "blocks": tensor_size},
        ),
        ("mlp.linear_fc2.weight", ("mlp.down_proj",), {"shapes": ((hidden, neurons),), "cut": "columns"}),
    )
    for name, weights, how in parts:
        yield Part(f"{megatron}{name}", tuple(f"{prefix}{each}.weight" for each in weights), **how)
