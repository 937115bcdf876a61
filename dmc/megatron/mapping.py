"""A Llama in Megatron's terms: its arguments and our configuration, its tensors and the Hugging Face weights in them.

Both sides rotate halves, channel i with i + D/2, so queries and keys keep the order of their rows, and the borrowed
neuron is the last channel of each head here and there.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig

from dmc.compression import CompressionConfig
from dmc.models import FAMILIES
from dmc.models.tensor_parallel import check_divides

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
FIELDS = {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads", "kv_channels": "head_dim", "norm_epsilon": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
}  # fmt: skip
"""Megatron's arguments and the equivalent fields of a transformers configuration."""
NEEDED = tuple(FIELDS)[:4]
OF_A_LLAMA: dict[str, tuple[Any, ...]] = {
    "swiglu": (True,),
    "normalization": ("RMSNorm",),
    "position_embedding_type": ("rope",),
    "rotary_percent": (1.0,),
    "rotary_interleaved": (False,),
    "rotary_seq_len_interpolation_factor": (1,),
    "use_rope_scaling": (False,),
    "add_bias_linear": (False,),
    "add_qkv_bias": (False,),
    "qk_layernorm": (False,),
    "apply_layernorm_1p": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "multi_latent_attention": (False,),
}
"""Values of Megatron's arguments under which the model is a Llama; an argument may also be absent or None."""
MEGATRON_EPS = 2**-7
"""Constant that Megatron's inference adds to the importance: the resolution of bfloat16."""


def gates_of(arguments: dict[str, Any]) -> CompressionConfig | None:
    """Read the gates' settings of the `dmc` branch; None for a model without gates.

    Differs from the authors' kernel, which rounds bfloat16 decisions up from 0.00785 and fixes the window at 12: a
    decision is > 0 here, as in training, and the window is the one of training.
    """
    offset = arguments.get("dmc_init_val")
    if offset is None:
        return None
    return CompressionConfig(
        action="merge",
        delay=0,
        window_size=arguments.get("dmc_window_size", 12) or None,
        neuron_index=-1,
        decision_offset=float(offset),
        omega_offset=float(offset),
        eps=MEGATRON_EPS,
        temperature=float(arguments.get("dmc_temp") or 0.1),
        target_ratio=float(arguments.get("dmc_cr") or 1.0),
    )


def configuration_of(arguments: dict[str, Any], vocab_size: int, dtype: torch.dtype, tied: bool) -> Any:
    """Make the configuration of a stock Llama, or of a compressed one where Megatron's has gates.

    Args:
        arguments: Megatron's arguments, by name.
        vocab_size: tokens without padding.
        dtype: of the weights.
        tied: whether the output layer is the embedding.
    Raises:
        ValueError: an argument is missing, or the model is no Llama.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if given.get("use_rotary_position_embeddings"):
        given["position_embedding_type"] = "rope"
    missing = [name for name in NEEDED if name not in given]
    if missing:
        raise ValueError(f"the checkpoint stores no argument {', '.join(missing)}: give args={{{missing[0]}: ...}}")
    for name, expected in OF_A_LLAMA.items():
        if given.get(name, expected[0]) not in expected:
            raise ValueError(
                f"{name}={given[name]!r} is not of Llama: expected {expected[0]!r}; "
                f"args={{{name}: {expected[0]}}} overrules what is stored"
            )
    num_heads = given["num_attention_heads"]
    given = {
        "kv_channels": given["hidden_size"] // num_heads,
        "norm_epsilon": given.get("layernorm_epsilon", 1e-5),
        "max_position_embeddings": given.get("seq_length", 4096),
        **given,
    }
    values = {ours: given[theirs] for theirs, ours in FIELDS.items()} | {
        "vocab_size": vocab_size,
        "num_key_value_heads": given["num_query_groups"] if given.get("group_query_attention") else num_heads,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(given.get("rotary_base", 10000))},
        "tie_word_embeddings": tied,
        "dtype": dtype,
    }
    gates = gates_of(given)
    try:
        if gates is None:
            return LlamaConfig(**values, architectures=["LlamaForCausalLM"])
        model = FAMILIES["llama"]
        return model.config_class(**values, architectures=[model.__name__], compression=gates.to_dict())
    except StrictDataclassError as error:
        raise ValueError(f"transformers cannot build a Llama model from the arguments: {error}") from None


def arguments_of(config: Any, tensor_size: int, padded_vocab_size: int, dtype: torch.dtype) -> Namespace:
    """Make Megatron's arguments of a stock or compressed Llama.

    Args:
        config: its Hugging Face configuration.
        tensor_size: tensor-parallel ranks.
        padded_vocab_size: rows of the embedding, all ranks together.
        dtype: of the weights.
    Raises:
        ValueError: Megatron does not support the model or its gates.
    """
    refuse_foreign(config)
    arguments = {
        **{theirs: getattr(config, ours) for theirs, ours in FIELDS.items()},
        "group_query_attention": True,
        "num_query_groups": config.num_key_value_heads,
        "seq_length": config.max_position_embeddings,
        "rotary_base": int(config.rope_parameters["rope_theta"]),
        "use_rotary_position_embeddings": True,
        "add_position_embedding": False,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "vocab_size": config.vocab_size,
        "padded_vocab_size": padded_vocab_size,
        "make_vocab_size_divisible_by": padded_vocab_size // tensor_size,
        "tokenizer_type": "Llama2Tokenizer",
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "transformer_impl": "transformer_engine",
        "tensor_model_parallel_size": tensor_size,
        "pipeline_model_parallel_size": 1,
        **{name: expected[0] for name, expected in OF_A_LLAMA.items()},
        "rotary_seq_len_interpolation_factor": None,
    }
    if hasattr(config, "compression"):
        arguments.update(gate_arguments(CompressionConfig.from_dict(config.compression), config.head_dim))
    return Namespace(**arguments)


def refuse_foreign(config: Any) -> None:
    """Raise ValueError for a model that is not the Llama of Megatron-LM."""
    if config.model_type not in ("llama", "dmc_llama"):
        raise ValueError(f"model_type={config.model_type!r} is not written for Megatron: expected llama or dmc_llama")
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type != "default":
        raise ValueError(f"rope_type={rope_type!r} is not written for Megatron: expected 'default'")
    if config.rope_parameters["rope_theta"] % 1:
        raise ValueError(f"rope_theta={config.rope_parameters['rope_theta']}: Megatron's rotary_base is a whole number")
    if config.attention_bias or config.mlp_bias:
        raise ValueError("biases are not written for Megatron: expected attention_bias=false and mlp_bias=false")


def gate_arguments(gates: CompressionConfig, head_dim: int) -> dict[str, Any]:
    """Convert gates to the arguments of the `dmc` branch.

    Raises:
        ValueError: Megatron's gates do not support these settings.
    """
    expected = {
        "action": "merge", "decisions": "per_head", "gate_input": "neuron", "weighting": "learned", "delay": 0,
        "decided_token": "own", "eps": MEGATRON_EPS,
    }  # fmt: skip
    wrong = [f"{name}={getattr(gates, name)!r}" for name, value in expected.items() if getattr(gates, name) != value]
    if gates.neuron_index % head_dim != head_dim - 1:
        wrong.append(f"neuron_index={gates.neuron_index}")
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)}: Megatron's gates merge at once (action='merge', delay=0), each head for itself "
            f"and with learned weights, read the last channel (neuron_index=-1) and add eps={MEGATRON_EPS}"
        )
    if gates.decision_offset != gates.omega_offset and min(gates.decision_offset, gates.omega_offset) <= 0:
        raise ValueError(
            f"decision_offset={gates.decision_offset} and omega_offset={gates.omega_offset} differ: Megatron has one "
            "dmc_init_val for both, and only offsets > 0 are brought together by scaling the decision rows"
        )
    return {
        "dmc_init_val": gates.omega_offset,
        "dmc_window_size": gates.window_size or 0,
        "dmc_temp": gates.temperature,
        "dmc_cr": gates.target_ratio,
        "dmc_finetune": True,
        "dmc_is_stage_one": False,
    }


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
        fused = torch.cat(shards, dim=0 if self.cut == "rows" else 1)
        if len(self.weights) == 1:
            return [fused[: self.shapes[0][0]].contiguous()]
        turns = fused.unflatten(0, (self.blocks, -1))
        rows = [shape[0] // self.blocks for shape in self.shapes]
        return [piece.flatten(0, 1) for piece in turns.split(rows, dim=1)]

    def shard(self, weights: list[Tensor], rank: int, tensor_size: int) -> Tensor:
        """Make the shard of rank `rank` of `tensor_size` out of whole weights; the inverse of `join`."""
        if self.cut == "nowhere":
            return weights[0]
        if self.padding:
            weights = [torch.cat((weight, weight[-1:].expand(self.padding, -1))) for weight in weights]
        parts = [weight.chunk(tensor_size, dim=0 if self.cut == "rows" else 1)[rank] for weight in weights]
        if len(parts) == 1:
            return parts[0].clone(memory_format=torch.contiguous_format)  # torch.save would store all that a view is of
        turns = self.blocks // tensor_size
        return torch.cat([weight.unflatten(0, (turns, -1)) for weight in parts], dim=1).flatten(0, 1)


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
        yield Part(f"{megatron}{name}", tuple(f"{prefix}{weight}.weight" for weight in weights), **how)
