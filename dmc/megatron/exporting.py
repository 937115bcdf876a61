"""Write a Hugging Face folder as a Megatron checkpoint, one file for each tensor-parallel rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from dmc.files import refuse_occupied, replacement
from dmc.megatron.arguments import arguments_of
from dmc.megatron.checkpoint import FILE_NAMES, TRACKER
from dmc.megatron.tensors import parts_of
from dmc.models.weights import check_weights, open_weights

CHECKPOINT_VERSION = 3.0
TRANSFORMER_ENGINE = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
"""Modules of a layer that look for an extra state (of FP8) when a checkpoint is loaded."""


def export_checkpoint(
    folder: Path, output: Path, *, tensor_size: int = 1, vocab_multiple: int = 128, overwrite: bool = False
) -> Path:
    """Write a stock or compressed Llama as a Megatron release checkpoint, a rank at a time.

    Calibrated gates have a separate decision offset, while Megatron has one `dmc_init_val` for decision and importance:
    the rows that produce the decision are then scaled, which keeps every decision up to rounding.

    Args:
        folder: Hugging Face folder.
        output: new or empty folder.
        tensor_size: tensor-parallel ranks.
        vocab_multiple: the rows of each rank's embedding are a multiple of this (--make-vocab-size-divisible-by).
        overwrite: replace a folder that was exported here.
    Returns:
        The output folder.
    Raises:
        FileNotFoundError, ValueError: see `check_weights` and `arguments_of`; or the model does not divide.
        FileExistsError: `output` may not be written or replaced, see `refuse_occupied`.
    """
    refuse_occupied(output, overwrite, [folder])
    check_weights(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if tensor_size < 1 or vocab_multiple < 1:
        raise ValueError(f"tensor_size={tensor_size}, vocab_multiple={vocab_multiple}: expected whole numbers >= 1")
    step = tensor_size * vocab_multiple
    padded = -(-config.vocab_size // step) * step
    weights = open_weights(folder)
    arguments = arguments_of(config, tensor_size, padded, weights["model.embed_tokens.weight"][:0].dtype)
    parts = list(parts_of(config, tensor_size, padded))
    scale = decision_scale(config)
    with replacement(output, overwrite, [folder]) as partial:
        (partial / TRACKER).write_text("release")
        for rank in range(tensor_size):
            model: dict[str, Tensor | None] = {}
            for part in parts:
                held = [scaled(name, weights[name][:], config.head_dim, scale) for name in part.weights]
                model[part.name] = part.shard(held, rank, tensor_size)
            for index in range(config.num_hidden_layers):
                model.update({f"decoder.layers.{index}.{module}._extra_state": None for module in TRANSFORMER_ENGINE})
            path = partial / "release" / f"mp_rank_{rank:02d}" / FILE_NAMES[0]
            path.parent.mkdir(parents=True)
            content = {"args": arguments, "checkpoint_version": CHECKPOINT_VERSION, "iteration": 0, "model": model}
            torch.save(content, path)
    return output


def decision_scale(config: Any) -> float:
    """Return the factor on the decision rows that applies their scale and moves their threshold to omega_offset."""
    gates = getattr(config, "compression", None)
    if gates is None or gates["decision_offset"] == gates["omega_offset"]:
        return 1.0 if gates is None else gates["decision_scale"]
    return gates["decision_scale"] * gates["omega_offset"] / gates["decision_offset"]


def scaled(name: str, weight: Tensor, head_dim: int, scale: float) -> Tensor:
    """Scale the last row of every head of a key projection, [H D, hidden]; other weights stay as they are."""
    if scale == 1 or not name.endswith(".k_proj.weight"):
        return weight
    weight = weight.clone()
    weight[head_dim - 1 :: head_dim] *= scale
    return weight
