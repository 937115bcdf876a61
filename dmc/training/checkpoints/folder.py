"""Checkpoints of sharded models: a folder of every rank's files, with a header that says what they hold."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dmc.checksums import file_checksum, file_checksums, file_damage
from dmc.training.checkpoints.generations import LAST_CHECKPOINT, PREVIOUS_CHECKPOINT, Generations, remove
from dmc.training.checkpoints.trust import refuse_code

MODEL_CONFIG = "model_config"
"""Key of the Hugging Face configuration in a checkpoint."""
HEADER_NAME = "header.json"
WRITER = re.compile(r"(?:^__|zero_pp_rank_)(\d+)_")
"""Number in a file's name of the rank that wrote it, in FSDP2's folders and in DeepSpeed's."""
REMEDY = "put back a copy, or delete the run to start over"
logger = logging.getLogger(__name__)


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
    checksums: dict[str, int] = dataclasses.field(default_factory=dict)
    """CRC-32 of each file in a folder; empty: an earlier version wrote it."""


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
        names = strategy.broadcast(_names_in(partial) if strategy.is_global_zero else [])
        sums, problem = _each_its_own(
            strategy, names, lambda name: (_flush(partial / name), file_checksum(partial / name))
        )
        if problem is not None:
            raise could_not_be_written(target, problem)
        header["files"] = {name: size for name, (size, _) in sums.items()}
        header["checksums"] = {name: checksum for name, (_, checksum) in sums.items()}
        if strategy.is_global_zero:
            try:
                (partial / HEADER_NAME).write_text(json.dumps(header | {"checksum": _checksum_of(header)}))
                _flush(partial / HEADER_NAME)
                self.generations.promote(partial, target)
            except OSError as error:
                raise could_not_be_written(target, error) from error
        strategy.barrier()

    def check(self, strategy: Any, folder: Path) -> Header:
        """Check that a checkpoint is what was written, each rank its part; called by all ranks.

        Returns:
            Its header.
        Raises:
            ValueError: it is not, on all ranks.
        """
        header = read_folder_header(folder)
        if not header.checksums:
            logger.warning("%s has no checksums, an earlier version wrote it: its bytes are not checked", folder)
            return header
        damage, problem = _each_its_own(
            strategy, sorted(header.checksums), lambda name: damage_in(folder, header, [name])
        )
        found = next((each for each in damage.values() if each is not None), problem)
        if found is not None:
            raise ValueError(f"{folder} is damaged: {found}; {_offer(folder)}")
        return header


def could_not_be_written(target: Path, error: BaseException | str) -> OSError:
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
        values = json.loads((folder / HEADER_NAME).read_text())
        checksum = values.pop("checksum", None)
        header = Header(**values)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} is no training checkpoint ({HEADER_NAME}: {type(error).__name__})") from error
    if checksum is not None and checksum != _checksum_of(values):
        raise ValueError(f"{folder} is damaged: {HEADER_NAME} has a wrong checksum; {REMEDY}")
    for name, size in header.files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{folder} is no training checkpoint: its {HEADER_NAME} names {name}, outside of it")
        if damage := file_damage(folder / name, size):
            raise ValueError(f"{folder} is cut off: {name} {damage}; {REMEDY}")
    refuse_code(folder, header.format)
    return header


def damage_in(folder: Path, header: Header, names: Iterable[str]) -> str | None:
    """Name the first of some files of a folder whose bytes are not what was written; None: there is none.

    Raises:
        OSError: a file cannot be read.
    """
    found = file_checksums(folder / name for name in names)
    for path, checksum in found.items():
        name = path.relative_to(folder).as_posix()
        if header.checksums.get(name, checksum) != checksum:
            return f"{name} has a wrong checksum"
    return None


def whole_shape(parameter: Any) -> tuple[int, ...]:
    """Shape of a weight over all ranks: DeepSpeed's ZeRO-3 leaves an empty tensor in its place."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _names_in(folder: Path) -> list[str]:
    """All files of a folder and its folders."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _each_its_own(strategy: Any, names: list[str], act: Callable[[str], Any]) -> tuple[dict[str, Any], str | None]:
    """Let each rank act on the files that it wrote, and tell all of them what came out and what failed, if anything."""
    results: dict[str, Any] = {}
    problem = None
    for place, name in enumerate(names):
        writer = WRITER.search(Path(name).name)
        if (int(writer[1]) if writer else place) % strategy.world_size == strategy.global_rank:
            try:
                results[name] = act(name)
            except OSError as error:  # a rank that ended here would leave the others waiting
                problem = str(error)
    parts: list[Any] = [(results, problem)]
    if dist.is_initialized():
        parts *= dist.get_world_size()
        dist.all_gather_object(parts, (results, problem))
    merged = {name: result for each, _ in parts for name, result in each.items()}
    return merged, next((each for _, each in parts if each is not None), None)


def _offer(folder: Path) -> str:
    """Say what can be done about a damaged checkpoint."""
    previous = folder.with_name(PREVIOUS_CHECKPOINT)
    try:
        step = read_folder_header(previous).global_step
    except ValueError:
        return REMEDY
    return REMEDY if folder.name != LAST_CHECKPOINT else f"{REMEDY}; or {offer(previous, step)}"


def offer(previous: Path, step: int) -> str:
    """Say how to take the checkpoint before the last one."""
    return f"start again with use_previous_checkpoint=true to go on from step {step}, which {previous} holds"


def _checksum_of(values: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def _flush(path: Path) -> int:
    """Wait until a file is on the disk; return its bytes."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return path.stat().st_size
