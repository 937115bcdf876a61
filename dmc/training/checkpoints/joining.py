"""Whole weights out of the shards that the ranks have written."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from tqdm import tqdm

PREFIX = "model."
"""Of a weight's name in a checkpoint: the LightningModule's attribute."""
WEIGHTS = "state_dict."
"""Of a weight's name in the shards; optimizer states have others, and stay on the disk."""


class ShowingPlanner(checkpoint.DefaultLoadPlanner):
    """Reads as the default one, and moves a bar on by the bytes that have been read."""

    def __init__(self, bar: tqdm) -> None:
        super().__init__()
        self.bar = bar

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        """See `LoadPlanner.commit_tensor`."""
        super().commit_tensor(read_item, tensor)
        self.bar.update(tensor.nbytes)


def join_shards(folder: Path) -> dict[str, Tensor]:
    """Read a checkpoint of any number of ranks into one process, with a bar that a job's log shows too.

    Args:
        folder: with a file for each rank.
    Returns:
        Name: whole weight on the CPU.
    """
    reader = checkpoint.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    weights: dict[str, Any] = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in stored.items()
        if name.startswith(WEIGHTS) and isinstance(each, TensorStorageMetadata)
    }
    num_bytes = sum(weight.nbytes for weight in weights.values())
    with tqdm(total=num_bytes, desc="joining shards", unit="B", unit_scale=True) as bar:
        checkpoint.load(weights, storage_reader=reader, planner=ShowingPlanner(bar), no_dist=True)
    return {name.removeprefix(WEIGHTS): weight for name, weight in weights.items()}


def join_slices(folder: Path, shapes: dict[str, list[int]]) -> dict[str, Tensor] | None:
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
    return {name: weight.view(shapes[name.removeprefix(PREFIX)]) for name, weight in weights.items()}
