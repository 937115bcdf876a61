"""Checkpoints of sharded models: a folder of every rank's files, with a header that says what they hold."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from dmc.training.checkpoints.generations import Generations, remove

MODEL_CONFIG = "model_config"
"""Key of the Hugging Face configuration in a checkpoint."""
HEADER_NAME = "header.json"


@dataclass(frozen=True)
class Header:
    """What can be known of a checkpoint without reading its weights."""

    format: str
    """"file", or the strategy that wrote the folder."""
    num_ranks: int
    """Ranks whose shards it holds."""
    global_step: int
    model_config: dict[str, Any]
    shapes: dict[str, list[int]]
    """Shape of each whole weight, under the model's own name."""
    files: dict[str, int] = dataclasses.field(default_factory=dict)
    """Bytes of each file in a folder."""


class CheckpointFolders:
    """Lets a strategy write a folder beside its place, on all ranks together, and then rename it.

    Args:
        format: the strategy's name.
    """

    def __init__(self, format: str) -> None:
        self.format = format
        self.generations = Generations()

    def save(self, strategy: Any, checkpoint: dict[str, Any], target: Path, write: Callable[..., None]) -> None:
        """Write `checkpoint` to the folder `target`; called by all ranks.

        Args:
            strategy: Lightning's, for what the ranks must agree on.
            checkpoint: what Lightning has collected.
            target: a folder that all ranks can see.
            write: the strategy's own way to write, called with the checkpoint and a folder.
        Raises:
            OSError: it could not be written; what was at `target` is still there.
        """
        target = Path(strategy.broadcast(str(target)))
        partial = target.with_name(f"{target.name}.partial")
        model = strategy.lightning_module.model
        header = {
            "format": self.format,
            "num_ranks": strategy.world_size,
            "global_step": checkpoint["global_step"],
            "model_config": checkpoint[MODEL_CONFIG],
            "shapes": {name: list(whole_shape(value)) for name, value in model.state_dict(keep_vars=True).items()},
        }
        if strategy.is_global_zero:
            remove(partial)
        strategy.barrier()
        try:
            write(checkpoint, partial)
        except (OSError, RuntimeError, CheckpointException) as error:
            raise could_not_be_written(target, error) from error
        strategy.barrier()
        if strategy.is_global_zero:
            try:
                header["files"] = {str(path.relative_to(partial)): _flush(path) for path in files_in(partial)}
                (partial / HEADER_NAME).write_text(json.dumps(header))
                _flush(partial / HEADER_NAME)
                self.generations.promote(partial, target)
            except OSError as error:
                raise could_not_be_written(target, error) from error
        strategy.barrier()


def could_not_be_written(target: Path, error: BaseException) -> OSError:
    """Say that the checkpoint before stays."""
    return OSError(
        f"{target} could not be written ({error}): the checkpoint before it stays; make room on the disk and "
        "start the same command again"
    )


def read_folder_header(folder: Path) -> Header:
    """Read the header of a checkpoint folder and check that its files are whole.

    Raises:
        ValueError: it is no checkpoint, or a file is missing or cut off.
    """
    try:
        header = Header(**json.loads((folder / HEADER_NAME).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{folder} is no training checkpoint ({HEADER_NAME}: {type(error).__name__})") from error
    for name, size in header.files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise ValueError(
                f"{folder} is cut off: {name} has {'no' if found is None else found} bytes, expected {size}; "
                "put back a copy, or delete the run to start over"
            )
    return header


def whole_shape(parameter: Any) -> tuple[int, ...]:
    """Shape of a weight over all ranks: DeepSpeed's ZeRO-3 leaves an empty tensor in its place."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def files_in(folder: Path) -> list[Path]:
    """All files of a folder and its folders."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _flush(path: Path) -> int:
    """Wait until a file is on the disk; return its bytes."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return path.stat().st_size
