"""One checkpoint: a folder of every rank's files, with a header that says what they hold and how to tell damage."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dmc.checksums import file_checksum, file_checksums, file_damage
from dmc.training.checkpoints.trust import refuse_code

MODEL_CONFIG = "model_config"
"""Key of the Hugging Face configuration in what Lightning collects for a checkpoint."""
SHARDED = "sharded"
"""Format of all strategies but DeepSpeed's, whose format is the strategy's name."""
HEADER_NAME = "header.json"
WRITER = re.compile(r"(?:^__|zero_pp_rank_)(\d+)_")
"""Number in a file's name of the rank that wrote it, in torch's folders and in DeepSpeed's."""
REMEDY = "put back a copy, or delete the run to start over"


@dataclass(frozen=True)
class Header:
    """What can be known of a checkpoint without reading its weights."""

    format: str
    """`SHARDED`, or the name of a DeepSpeed strategy."""
    num_ranks: int
    """Ranks that wrote it."""
    global_step: int
    model_config: dict[str, Any]
    shapes: dict[str, list[int]]
    """Shape of each whole weight, under the model's own name."""
    tied: dict[str, str]
    """Names of weights that are stored once, under another name."""
    files: dict[str, int] = dataclasses.field(default_factory=dict)
    """Bytes of each file."""
    checksums: dict[str, int] = dataclasses.field(default_factory=dict)
    """CRC-32 of each file."""

    @classmethod
    def of(cls, format: str, checkpoint: dict[str, Any], model: Any) -> Header:
        """Describe what Lightning has collected, before any file of it is written."""
        names: dict[int, str] = {}
        shapes, tied = {}, {}
        for name, value in model.state_dict(keep_vars=True).items():
            shapes[name] = list(whole_shape(value))
            if names.setdefault(id(value), name) != name:
                tied[name] = names[id(value)]
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        return cls(format, num_ranks, checkpoint["global_step"], checkpoint[MODEL_CONFIG], shapes, tied)


def gathered(value: Any, group: Any = None) -> list[Any]:
    """Collect a value of each rank on all of them; called by all ranks together."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def write_header(folder: Path, header: Header, group: Any = None) -> None:
    """Complete a folder whose other files are written: called by all ranks, each reads back its own files.

    Raises:
        OSError: on all ranks, where one could not.
    """
    names = gathered(_names_in(folder), group)[0]
    sums, problem = _each_its_own(names, lambda name: (_flush(folder / name), file_checksum(folder / name)), group)
    if problem is None and (not dist.is_initialized() or dist.get_rank() == 0):
        values = dataclasses.asdict(header)
        values["files"] = {name: size for name, (size, _) in sums.items()}
        values["checksums"] = {name: checksum for name, (_, checksum) in sums.items()}
        try:
            (folder / HEADER_NAME).write_text(json.dumps(values | {"checksum": _checksum_of(values)}))
            _flush(folder / HEADER_NAME)
        except OSError as error:
            problem = str(error)
    problem = next((each for each in gathered(problem, group) if each is not None), None)
    if problem is not None:
        raise OSError(problem)


def read_header(folder: Path) -> Header:
    """Read what a checkpoint holds, not its weights, and check that its files have their sizes and no code.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no checkpoint, holds code, or a file is missing or cut off.
    """
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist: expected a checkpoint, a folder of a run's checkpoints")
    try:
        values = json.loads((folder / HEADER_NAME).read_text())
        checksum = values.pop("checksum")
        header = Header(**values)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{folder} is no training checkpoint ({HEADER_NAME}: {type(error).__name__})") from error
    if checksum != _checksum_of(values):
        raise ValueError(f"{folder} is damaged: {HEADER_NAME} has a wrong checksum; {REMEDY}")
    for name, size in header.files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{folder} is no training checkpoint: its {HEADER_NAME} names {name}, outside of it")
        if damage := file_damage(folder / name, size):
            raise ValueError(f"{folder} is cut off: {name} {damage}; {REMEDY}")
    refuse_code(folder, header.format)
    return header


def check_whole(folder: Path) -> Header:
    """Read all of a checkpoint and compare it with its checksums; return its header.

    Raises:
        FileNotFoundError, ValueError: see `read_header`; or bytes are not what was written.
    """
    header = read_header(folder)
    if damage := _damage_in(folder, header, header.checksums):
        raise ValueError(f"{folder} is damaged: {damage}; {REMEDY}")
    return header


def check_whole_together(folder: Path, group: Any = None) -> Header:
    """Do what `check_whole` does on all ranks, each with its share of the files.

    Raises:
        ValueError: on all ranks, see `check_whole`.
    """
    header = read_header(folder)
    damage, problem = _each_its_own(sorted(header.checksums), lambda name: _damage_in(folder, header, [name]), group)
    found = next((each for each in damage.values() if each is not None), problem)
    if found is not None:
        raise ValueError(f"{folder} is damaged: {found}; {REMEDY}")
    return header


def check_fits(folder: Path, model: Any, format: str = SHARDED) -> Header:
    """Return the header of a checkpoint that a model can go on from.

    Raises:
        FileNotFoundError, ValueError: see `read_header`; or it was written by another strategy, or a weight is missing,
            unexpected, or of another shape.
    """
    header = read_header(folder)
    if header.format != format:
        raise ValueError(
            f"{folder} was written as {header.format!r}, this run reads {format!r}: only DeepSpeed's strategies read "
            "what they have written, each its own; start with the trainer.strategy that it was trained with, or "
            "export it and train on from the exported folder"
        )
    stored = {name: tuple(shape) for name, shape in header.shapes.items()}
    expected = {name: whole_shape(value) for name, value in model.state_dict(keep_vars=True).items()}
    missing, unexpected = sorted(set(expected) - set(stored)), sorted(set(stored) - set(expected))
    if missing or unexpected:
        raise ValueError(
            f"{folder} does not fit the model: {len(missing)} weights missing (first {missing[:1]}), "
            f"{len(unexpected)} unexpected (first {unexpected[:1]}); was it trained from another model?"
        )
    for name, shape in expected.items():
        if shape != stored[name]:
            raise ValueError(
                f"{folder} does not fit the model: {name} has shape {stored[name]} in the checkpoint and {shape} in "
                "the model"
            )
    return header


def whole_shape(parameter: Any) -> tuple[int, ...]:
    """Shape of a weight over all ranks: DeepSpeed's ZeRO-3 leaves an empty tensor in its place."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _damage_in(folder: Path, header: Header, names: Iterable[str]) -> str | None:
    """Name the first of some files whose bytes are not what was written; None: there is none."""
    for path, checksum in file_checksums(folder / name for name in names).items():
        name = path.relative_to(folder).as_posix()
        if header.checksums.get(name) != checksum:
            return f"{name} has a wrong checksum"
    return None


def _names_in(folder: Path) -> list[str]:
    """All files of a folder and its folders."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _each_its_own(names: list[str], act: Callable[[str], Any], group: Any) -> tuple[dict[str, Any], str | None]:
    """Let each rank act on the files that it wrote, and tell all of them what came out and what failed, if anything."""
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    results: dict[str, Any] = {}
    problem = None
    for place, name in enumerate(names):
        writer = WRITER.search(Path(name).name)
        if (int(writer[1]) if writer else place) % size == rank:
            try:
                results[name] = act(name)
            except OSError as error:  # a rank that ended here would leave the others waiting
                problem = str(error)
    parts = gathered((results, problem), group)
    merged = {name: result for each, _ in parts for name, result in each.items()}
    return merged, next((each for _, each in parts if each is not None), None)


def _checksum_of(values: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def _flush(path: Path) -> int:
    """Wait until a file is on the disk; return its bytes."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return path.stat().st_size
