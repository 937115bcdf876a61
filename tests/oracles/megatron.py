"""Megatron checkpoints written and run naively: by loops over heads, from the layout and the step form alone.

`Weights` draws a Llama head by head, `write` cuts it among ranks as Megatron stores it, and `ShardedOracle` feeds
tokens one by one through those shards in float64, every rank with its own heads, as tensor-parallel Megatron would.
"""

from __future__ import annotations

import argparse
import io
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from oracles.step_by_step import HeadOracle
from torch import Tensor

LEGACY = {
    "embedding.": "language_model.embedding.",
    "output_layer.": "language_model.output_layer.",
    "decoder.": "language_model.encoder.",
    "final_layernorm.": "final_norm.",
    "self_attention.linear_qkv.layer_norm_weight": "input_norm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_norm.weight",
    "linear_qkv": "query_key_value",
    "linear_proj": "dense",
    "linear_fc1": "dense_h_to_4h",
    "linear_fc2": "dense_4h_to_h",
}
LOCAL = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
GATES = {"dmc_init_val": 0.1, "dmc_window_size": 3, "dmc_temp": 0.1, "dmc_cr": 4.0}


@dataclass(frozen=True)
class Weights:
    """A random Llama, each head a matrix of its own: large enough that decisions go both ways."""

    heads: int = 4
    groups: int = 2
    num_layers: int = 2
    hidden: int = 24
    head_dim: int = 16
    neurons: int = 32
    vocab_size: int = 21
    tied: bool = False
    decision_scale: float = 1.0
    seed: int = 0
    dtype: torch.dtype = torch.float32
    layers: list[dict[str, Any]] = field(default_factory=list)
    unsharded: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape, mean=0.0):
            return (mean + 0.3 * torch.randn(shape, generator=generator)).to(self.dtype)

        for number in range(self.num_layers):
            self.layers.append(
                {
                    "query": [draw(self.head_dim, self.hidden) for _ in range(self.heads)],
                    "key": [draw(self.head_dim, self.hidden) for _ in range(self.groups)],
                    "value": [draw(self.head_dim, self.hidden) for _ in range(self.groups)],
                    "output": [draw(self.hidden, self.head_dim) for _ in range(self.heads)],
                    "gate": draw(self.neurons, self.hidden),
                    "up": draw(self.neurons, self.hidden),
                    "down": draw(self.hidden, self.neurons),
                    "norms": [draw(self.hidden, mean=1.0), draw(self.hidden, mean=1.0)],
                }
            )
            for key in self.layers[number]["key"]:
                key[-1] *= self.decision_scale
        self.unsharded.update(
            embedding=draw(self.vocab_size, self.hidden),
            output=draw(self.vocab_size, self.hidden),
            norm=draw(self.hidden, mean=1.0),
        )

    def arguments(self, tensor_size, pipeline_size, padded, **changes):
        """Say what Megatron stores of this model."""
        values = {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden,
            "ffn_hidden_size": self.neurons,
            "num_attention_heads": self.heads,
            "group_query_attention": self.groups != self.heads,
            "num_query_groups": self.groups if self.groups != self.heads else 1,
            "kv_channels": self.head_dim,
            "max_position_embeddings": 512,
            "norm_epsilon": 1e-5,
            "rotary_base": 100,
            "rotary_percent": 1.0,
            "rotary_interleaved": False,
            "position_embedding_type": "rope",
            "swiglu": True,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "untie_embeddings_and_output_weights": not self.tied,
            "padded_vocab_size": padded,
            "params_dtype": self.dtype,
            "tensor_model_parallel_size": tensor_size,
            "pipeline_model_parallel_size": pipeline_size,
            **changes,
        }
        return argparse.Namespace(**values)

    def shard(self, rank, tensor_size, stage, pipeline_size, padded):
        """Make the tensors of one rank, named as Megatron-Core on Transformer Engine names them."""
        tensors = {}
        rows = padded // tensor_size

        def vocabulary(table):
            ids = [min(row, self.vocab_size - 1) for row in range(rank * rows, (rank + 1) * rows)]
            return torch.stack([table[row] for row in ids])

        if stage == 0:
            tensors["embedding.word_embeddings.weight"] = vocabulary(self.unsharded["embedding"])
        per_stage = self.num_layers // pipeline_size
        for local, layer in enumerate(self.layers[stage * per_stage : (stage + 1) * per_stage]):
            name = f"decoder.layers.{local}."
            fused, outputs = [], []
            for group in range(rank * self.groups // tensor_size, (rank + 1) * self.groups // tensor_size):
                of_group = range(group * self.heads // self.groups, (group + 1) * self.heads // self.groups)
                fused += [layer["query"][head] for head in of_group] + [layer["key"][group], layer["value"][group]]
                outputs += [layer["output"][head] for head in of_group]
            neurons = range(rank * self.neurons // tensor_size, (rank + 1) * self.neurons // tensor_size)
            tensors[name + "self_attention.linear_qkv.layer_norm_weight"] = layer["norms"][0].clone()
            tensors[name + "self_attention.linear_qkv.weight"] = torch.cat(fused)
            tensors[name + "self_attention.linear_proj.weight"] = torch.cat(outputs, dim=1)
            tensors[name + "mlp.linear_fc1.layer_norm_weight"] = layer["norms"][1].clone()
            gate_and_up = [layer["gate"][neuron] for neuron in neurons] + [layer["up"][neuron] for neuron in neurons]
            tensors[name + "mlp.linear_fc1.weight"] = torch.stack(gate_and_up)
            tensors[name + "mlp.linear_fc2.weight"] = torch.stack(
                [layer["down"][:, neuron] for neuron in neurons], dim=1
            )
        if stage == pipeline_size - 1:
            tensors["decoder.final_layernorm.weight"] = self.unsharded["norm"].clone()
            if not self.tied:
                tensors["output_layer.weight"] = vocabulary(self.unsharded["output"])
            elif pipeline_size > 1:
                tensors["output_layer.weight"] = vocabulary(self.unsharded["embedding"])
        return tensors


def write(weights, folder, *, sizes=(1, 1), padded=24, dialect="transformer_engine", extra=None, **changes):
    """Write a checkpoint with `sizes` tensor x pipeline ranks; `changes` are arguments, GATES among them by default."""
    arguments = weights.arguments(*sizes, padded, **{**GATES, **changes})
    (folder / "iter_0000040").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("40\n")
    for stage in range(sizes[1]):
        for rank in range(sizes[0]):
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if sizes[1] > 1 else "")
            tensors = weights.shard(rank, sizes[0], stage, sizes[1], padded)
            content = {"args": arguments, "checkpoint_version": 3.0, "iteration": 40, **(extra or {})}
            content["model"] = spelled(tensors, dialect)
            path = folder / "iter_0000040" / name / "model_optim_rng.pt"
            path.parent.mkdir()
            torch.save({key: value for key, value in content.items() if value is not None}, path)
    return folder


def spelled(tensors, dialect):
    """Name tensors as another kind of Megatron model does; Transformer Engine adds the states of its modules."""
    if dialect == "transformer_engine":
        modules = {name.removesuffix("weight") for name in tensors if ".linear_" in name and name.endswith(".weight")}
        return {**tensors, **{module + "_extra_state": io.BytesIO(b"nothing") for module in modules}}
    named = {}
    for name, tensor in tensors.items():
        for ours, other in (LEGACY if dialect == "legacy" else LOCAL).items():
            name = name.replace(ours, other)
        named[name] = tensor
    if dialect == "local":
        return named
    tree = {"language_model": {"embedding": {"word_embeddings": {}}, "encoder": {}, "output_layer": {}}}
    for name, tensor in named.items():
        _, part, rest = name.split(".", 2)
        if part == "embedding":
            tree["language_model"][part]["word_embeddings"]["weight"] = tensor
        else:
            tree["language_model"][part][rest] = tensor
    return tree


class PlainHead:
    """One KV head without gates: every token stays."""

    def __init__(self, head_dim, theta):
        self.head_dim, self.theta = head_dim, theta
        self.entries = []

    def rotate(self, state, position):
        first, second = np.split(state, 2)
        angles = position * self.theta ** (-2 * np.arange(self.head_dim // 2) / self.head_dim)
        return np.concatenate(
            (first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles))
        )

    def step(self, queries, key, value, scaling):
        position = len(self.entries)
        self.entries.append((self.rotate(key, position), value))
        outputs = []
        for query in queries:
            rotated = self.rotate(query, position)
            weights = np.exp([rotated @ key * scaling for key, _ in self.entries])
            outputs.append(sum(w * v for w, (_, v) in zip(weights, self.entries, strict=True)) / weights.sum())
        return outputs


class ShardedOracle:
    """A checkpoint as it lies in its files, run token by token; rank r computes with the tensors of rank r alone."""

    def __init__(self, folder, sizes):
        self.stages = []
        for stage in range(sizes[1]):
            self.stages.append([])
            for rank in range(sizes[0]):
                name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if sizes[1] > 1 else "")
                stored = torch.load(folder / "iter_0000040" / name / "model_optim_rng.pt", weights_only=False)
                tensors = {key: value for key, value in stored["model"].items() if isinstance(value, Tensor)}
                self.stages[-1].append({key: value.double().numpy() for key, value in tensors.items()})
        self.args = stored["args"]
        self.groups = self.args.num_query_groups if self.args.group_query_attention else self.args.num_attention_heads
        self.heads = {}

    def head(self):
        if getattr(self.args, "dmc_init_val", None) is None:
            return PlainHead(self.args.kv_channels, self.args.rotary_base)
        settings = SimpleNamespace(
            action="merge",
            decisions="per_head",
            decided_token="own",
            gate_input="neuron",
            weighting="learned",
            decision_scale=1.0,
            delay=0,
            window_size=self.args.dmc_window_size or None,
            neuron_index=-1,
            decision_offset=self.args.dmc_init_val,
            omega_offset=self.args.dmc_init_val,
            eps=torch.finfo(torch.bfloat16).eps,
        )
        return HeadOracle(settings, self.args.kv_channels, self.args.rotary_base)

    def run(self, tokens, vocab_size):
        """Return the logits after each token, padding left out, float64 [time, vocab]."""
        return torch.from_numpy(np.stack([self.feed(token) for token in tokens])[:, :vocab_size])

    def feed(self, token):
        rows = [rank["embedding.word_embeddings.weight"] for rank in self.stages[0]]
        hidden = rows[token // len(rows[0])][token % len(rows[0])]
        for stage, ranks in enumerate(self.stages):
            for layer in range(self.args.num_layers // len(self.stages)):
                hidden = self.layer(stage, layer, ranks, hidden)
        last = self.stages[-1]
        hidden = self.norm(hidden, last[0]["decoder.final_layernorm.weight"])
        tied = not self.args.untie_embeddings_and_output_weights
        output = rows if tied else [rank["output_layer.weight"] for rank in last]
        return np.concatenate([row @ hidden for row in output])

    def layer(self, stage, layer, ranks, hidden):
        name = f"decoder.layers.{layer}."
        normed = self.norm(hidden, ranks[0][name + "self_attention.linear_qkv.layer_norm_weight"])
        attended = [self.attention(stage, layer, number, rank, normed) for number, rank in enumerate(ranks)]
        hidden = hidden + sum(attended)
        normed = self.norm(hidden, ranks[0][name + "mlp.linear_fc1.layer_norm_weight"])
        for rank in ranks:
            gate, up = np.split(rank[name + "mlp.linear_fc1.weight"] @ normed, 2)
            hidden = hidden + rank[name + "mlp.linear_fc2.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        return hidden

    def attention(self, stage, layer, number, rank, normed):
        name, size = f"decoder.layers.{layer}.self_attention.", self.args.kv_channels
        own_groups = self.groups // len(self.stages[0])
        mixed = (rank[name + "linear_qkv.weight"] @ normed).reshape(own_groups, -1, size)
        heads = self.heads.setdefault((stage, layer, number), [self.head() for _ in range(own_groups)])
        outputs = []
        for head, channels in zip(heads, mixed, strict=True):
            outputs += head.step(list(channels[:-2]), channels[-2], channels[-1], size**-0.5)
        return rank[name + "linear_proj.weight"] @ np.concatenate(outputs)

    def norm(self, states, weight):
        return states / np.sqrt((states**2).mean() + self.args.norm_epsilon) * weight

    def entries(self):
        """Entries held by every KV head, [layers, kv_heads]."""
        per_stage = self.args.num_layers // len(self.stages)
        return torch.tensor(
            [
                [head.num_entries for rank in range(len(self.stages[0])) for head in self.heads[stage, layer, rank]]
                for stage in range(len(self.stages))
                for layer in range(per_stage)
            ]
        )
