"""Read weights from a checkpoint of any number of ranks in one process."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoConfig

from dmc.models.build import assemble
from dmc.training.checkpoints.folder import SHARDED, TAG, read_header, read_metadata
from dmc.training.checkpoints.saving import FOLDER_NAME, find_checkpoint

WEIGHTS, OPTIMIZER = "model.", "optimizer."
"""Prefixes of names in a checkpoint: the model's weights, and optimizer states, which are not read here."""


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the whole weights of a checkpoint under the model's names."""
    header = read_header(folder)
    if header.format == SHARDED:
        weights = read_tensors(folder, WEIGHTS)
    else:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        joined = _join_slices(folder / TAG, header.shapes)
        if joined is None:
            joined = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=TAG)
        weights = {name.removeprefix(WEIGHTS): weight for name, weight in joined.items()}
    return weights | {name: weights[stored] for name, stored in header.tied.items()}


def read_tensors(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Read the whole tensors whose names begin with a prefix, under the rest of their names, on the CPU."""
    tensors: dict[str, Any] = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in read_metadata(folder).state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(each, TensorStorageMetadata)
    }
    checkpoint.load(tensors, checkpoint_id=folder, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def load_checkpoint_model(folder: Path) -> Any:
    """Rebuild the model of a checkpoint, stock or compressed."""
    header = read_header(folder)
    return assemble(AutoConfig.for_model(**header.model_config), read_weights(folder))


def load_last_model(run_folder: Path, use_previous: bool = False) -> tuple[Any, int]:
    """Rebuild the model of a run's last checkpoint; also return its number of optimizer steps.

    Raises:
        FileNotFoundError, ValueError: there is no checkpoint, or a damaged one, see `find_checkpoint`.
    """
    folder = run_folder / FOLDER_NAME
    checkpoint = find_checkpoint(folder, use_previous)
    if checkpoint is None:
        raise FileNotFoundError(f"{folder} holds no checkpoint: nothing is saved yet")
    return load_checkpoint_model(checkpoint), read_header(checkpoint).global_step


def _join_slices(folder: Path, shapes: dict[str, list[int]]) -> dict[str, Tensor] | None:
    """Join the float32 weights that DeepSpeed's ZeRO-1 keeps in bf16-mixed, which its own converter does not read.

    Args:
        folder: with the ranks' files.
        shapes: of every weight under the model's own name.
    Returns:
        Name: whole weight on the CPU; None: the folder is of another kind.
    """
    from deepspeed.utils.tensor_fragment import fragment_address

    slices: dict[str, list[Tensor]] = {}
    ranks = sorted(folder.glob("*_optim_states.pt"), key=lambda path: int(path.name.split("pp_rank_")[1].split("_")[0]))
    for path in ranks:
        with torch.serialization.safe_globals([fragment_address]):
            try:
                state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["optimizer_state_dict"]
            except pickle.UnpicklingError:  # other stages name classes of theirs
                return None
        if "param_slice_mappings" not in state or "single_partition_of_fp32_groups" not in state:
            return None
        for flat, places in zip(state["single_partition_of_fp32_groups"], state["param_slice_mappings"], strict=True):
            for name, place in places.items():
                slices.setdefault(name, []).append(flat[place.start : place.start + place.numel])
    weights = {name: torch.cat(parts) for name, parts in slices.items()}
    states = torch.load(folder / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=True, mmap=True)
    weights |= {alias: weights[name] for alias, name in states["shared_params"].items()}
    return {name: weight.view(shapes[name.removeprefix(WEIGHTS)]) for name, weight in weights.items()}
