"""Whole weights out of the shards that FSDP2's ranks have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from tqdm import tqdm

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
