"""Checkpoints of a run: folders that all ranks write together, in the background, and any number of ranks reads.

A folder holds the safetensors files that torch.distributed.checkpoint writes, of each rank its own: every weight once
under the model's own name (where gates alone are learned, theirs and no others) and the states of the optimizer by
weight; `trainer.pt`, Lightning's state; and `header.json`. It is written beside its place and gets its name by one
rename. The checkpoint before the last one is removed after that: at every moment there is a complete one. A checkpoint
may come from a stranger: no file of it can hold code that is run.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoConfig, GenerationConfig

from dmc.models.adapter import OF_ADAPTERS
from dmc.models.build import assemble
from dmc.models.weights import BASE_KEYS, named_base, open_weights, without_base
from dmc.ranks import ALONE, Ranks, first_line

FOLDER_NAME = "checkpoints"
"""Of a run's last checkpoints, in its output folder."""
MILESTONES_NAME = "milestones"
"""Of those that are kept for good."""
STEP = re.compile(r"step_(\d+)$")
MODEL_CONFIG = "model_config"
"""Key of the Hugging Face configuration in what Lightning collects for a checkpoint."""
GENERATION_CONFIG = "generation_config"
"""Key of the model's generation settings there."""
WEIGHTS, OPTIMIZER = "model.", "optimizer."
"""Prefixes of tensors' names: the model's weights, and the optimizer's states."""
HEADER_NAME = "header.json"
TRAINER_STATE = "trainer.pt"
"""File of a checkpoint's other state: counters, callbacks, the position in the text."""
FILE_BYTES = 2**30
"""Size of a file at which a rank begins another one: torch holds a copy of each while it is written."""
REMEDY = "put back a copy, or remove this folder to go on from the checkpoint before it"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Header:
    """Description of a checkpoint, readable without its weights."""

    global_step: int
    model_config: dict[str, Any]
    generation_config: dict[str, Any] = field(default_factory=dict)
    """The model's generation settings, as they differ from transformers' own."""
    files: dict[str, int] = field(default_factory=dict)
    """Names of the files that hold tensors, and their bytes."""

    @property
    def holds_gates_alone(self) -> bool:
        """Whether the other weights are those of a base, which `model_config` names."""
        return BASE_KEYS[-1] in self.model_config


def step_name(step: int) -> str:
    """Name the folder of a checkpoint."""
    return f"step_{step:07d}"


def saved_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, the newest first."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in paths if STEP.match(path.name)), key=lambda path: int(path.name[5:]), reverse=True)


class CheckpointSaver:
    """Writes checkpoints in the background, one after the other; `wait` waits for the last one."""

    def __init__(self) -> None:
        self.last: Path | None = None
        """Checkpoint that this process has written or read last."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future | None = None

    def save(self, target: Path, header: Header, write: Callable[[Path], Future], ranks: Ranks = ALONE) -> None:
        """Begin to write a checkpoint, unless it is the last one; called by all ranks.

        Args:
            target: a folder that all ranks can see.
            header: header of the checkpoint.
            write: called with the folder to write into; its future is done when all is written.
            ranks: all of them, in a process group without other communication meanwhile.
        Raises:
            OSError: this one, or the one before, could not be written; what was there still is.
        """
        self.wait()
        target = Path(ranks.all_gather_object(str(target.absolute()))[0])
        if target == self.last:
            return
        beside = target.with_name(f"{target.name}.partial")

        def make_room() -> None:
            if ranks.rank == 0:
                for rest in target.parent.glob("*.partial"):  # of a write that failed, or was killed
                    remove(rest)
                beside.mkdir(parents=True)

        with as_write_error(target, "the checkpoint before it"):
            ranks.run_on_all(make_room, OSError)
            writing = write(beside)  # from here on it communicates by itself
        self._pending = self._thread.submit(self._finish, writing, target, beside, header, ranks)

    def wait(self) -> None:
        """Wait until what was begun is on the disk; raise the OSError for which it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _finish(self, writing: Future, target: Path, beside: Path, header: Header, ranks: Ranks) -> None:
        def written() -> dict[str, int]:
            if error := writing.exception():
                raise OSError(reason_of(error)) from error
            return {path.name: path.stat().st_size for path in beside.glob(f"shard-{ranks.rank + 1:05d}-*.safetensors")}

        def complete(files: list[dict[str, int]]) -> None:
            if ranks.rank == 0:
                found = dataclasses.replace(header, files={name: size for part in files for name, size in part.items()})
                (beside / HEADER_NAME).write_text(json.dumps(dataclasses.asdict(found)))
                self._commit(beside, target)

        with as_write_error(target, "the checkpoint before it"):
            files = ranks.all_gather_object(ranks.run_on_all(written, OSError))  # nodes see others' files later
            ranks.run_on_all(lambda: complete(files), OSError)
        if target.parent.name != MILESTONES_NAME:
            self.last = target

    def _commit(self, beside: Path, target: Path) -> None:
        """Rename a complete checkpoint to `target`, and remove those that it replaces.

        The one that this process has written or read last stays. What is neither is older, or lies beyond the step that
        the run went on from, because it was damaged.
        """
        remove(target)
        os.replace(beside, target)
        if target.parent.name != MILESTONES_NAME:
            for path in target.parent.iterdir():
                if STEP.match(path.name.removesuffix(".partial")) and path not in (target, self.last):
                    remove(path)


def remove(path: Path) -> None:
    """Delete a folder if it exists."""
    shutil.rmtree(path, ignore_errors=True)  # what cannot be removed is no error of what has been written


def find_checkpoint(folder: Path, use_previous: bool = False, model: Any = None) -> Path | None:
    """Choose the checkpoint to resume from, or to export: the last one.

    Args:
        folder: holds the checkpoints.
        use_previous: take the previous one if the last is damaged.
        model: goes on from it, and must fit it; None: any model.
    Returns:
        None: there is none.
    Raises:
        ValueError: the checkpoint is damaged, or of another model; the message offers the previous one if that is good.
    """
    check = read_header if model is None else partial(check_fits, model=model)
    last = next(iter(saved_checkpoints(folder)), None)
    try:
        if last is not None:
            check(last)
        return last
    except ValueError as error:
        before = next(iter(saved_checkpoints(folder)[1:]), None)
        try:
            step = None if before is None else check(before).global_step
        except ValueError:
            step = None
        if step is None:
            raise
        if use_previous:
            logger.warning("%s; going on from %s", error, before)
            return before
        raise ValueError(
            f"{error}; or start again with use_previous_checkpoint=true to go on from step {step}, which {before} holds"
        ) from error


def load_last_model(run_folder: Path, use_previous: bool = False) -> tuple[Any, int]:
    """Rebuild the model of a run's last checkpoint, in this process; also return its number of optimizer steps.

    Raises:
        FileNotFoundError, ValueError: there is no checkpoint, or a damaged one, see `find_checkpoint`.
    """
    folder = run_folder / FOLDER_NAME
    found = find_checkpoint(folder, use_previous)
    if found is None:
        raise FileNotFoundError(f"{folder} holds no checkpoint: nothing is saved yet")
    return load_checkpoint_model(found), read_header(found).global_step


def load_checkpoint_model(folder: Path) -> Any:
    """Rebuild the model of a checkpoint, stock or compressed, in this process."""
    header, weights = read_header(folder), read_tensors(folder, WEIGHTS)
    config = without_base(AutoConfig.for_model(**header.model_config))
    if header.holds_gates_alone:
        stored = open_weights(named_base(header.model_config, folder))
        dtype = next(iter(weights.values())).dtype
        weights = {name: weight[:].to(dtype) for name, weight in stored.items()} | weights
    model = assemble(config, weights)
    if header.generation_config:  # older checkpoints have none: those of the configuration count
        model.generation_config = GenerationConfig.from_dict(header.generation_config)
    return model


def read_header(folder: Path) -> Header:
    """Read a checkpoint's header, and check that its files are complete.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it is no checkpoint, or one of another version, or a file is missing or cut off.
    """
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist: expected a checkpoint, a folder of a run's checkpoints")
    try:
        header = Header(**json.loads((folder / HEADER_NAME).read_text()))
        sizes = {str(name): int(size) for name, size in header.files.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} is no training checkpoint ({HEADER_NAME}: {type(error).__name__})") from error
    if not sizes or any(Path(name).name != name for name in sizes):
        raise ValueError(
            f"{folder} is no training checkpoint of this version of dmc ({HEADER_NAME} names no files of it)"
        )
    for name, expected in sizes.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if found < expected:
            raise ValueError(f"{folder} is cut off: {name} has {found} bytes, expected {expected}; {REMEDY}")
    if not zipfile.is_zipfile(folder / TRAINER_STATE):
        raise ValueError(f"{folder} is cut off: {TRAINER_STATE} is missing or incomplete; {REMEDY}")
    return header


def check_fits(folder: Path, model: Any) -> Header:
    """Return the header of a checkpoint after checking that it fits a model of which this rank has all weights.

    Raises:
        FileNotFoundError, ValueError: see `read_header`; or a weight is missing, unexpected, or of another shape.
    """
    header = read_header(folder)
    stored = {name: tuple(tensor.size) for name, tensor in stored_tensors(folder, WEIGHTS).items()}
    expected = {name: tuple(value.shape) for name, value in weights_of(model).items()}
    if header.holds_gates_alone:
        expected = {name: shape for name, shape in expected.items() if OF_ADAPTERS in name}
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


def weights_of(model: Any) -> dict[str, Any]:
    """Name every weight of a model once; tied ones have the first of their names."""
    names: dict[Any, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        names.setdefault(value, name)
    return {name: value for value, name in names.items()}


def read_tensors(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Read full tensors whose names begin with a prefix, by the rest of their names, in their shapes, on the CPU.

    Raises:
        ValueError: the checkpoint is damaged.
    """
    stored = stored_tensors(folder, prefix)
    tensors: dict[str, Any] = {
        prefix + name: torch.empty(tensor.size, dtype=tensor.properties.dtype) for name, tensor in stored.items()
    }
    with as_damage(folder):
        checkpoint.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return {name: tensors[prefix + name] for name in stored}


def read_state(folder: Path) -> dict[str, Any]:
    """Read what Lightning has saved beside the tensors.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        return torch.load(folder / TRAINER_STATE, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{folder} is damaged ({TRAINER_STATE}: {reason_of(error)}); {REMEDY}") from error


def stored_tensors(folder: Path, prefix: str = "") -> dict[str, TensorStorageMetadata]:
    """Read which tensors a folder holds, by their names without a prefix that the names must have.

    Raises:
        ValueError: the checkpoint is damaged.
    """
    try:
        found: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except Exception as error:  # whatever reading a foreign file comes to
        raise ValueError(f"{folder} is damaged ({first_line(error)}); {REMEDY}") from error
    return {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}


def storage_writer(folder: Path, tensors: Mapping[str, Any], num_ranks: int) -> HuggingFaceStorageWriter:
    """Return what writes each rank's parts of some tensors as safetensors files of about `FILE_BYTES`."""
    numbers, held = {}, 0
    for name, tensor in tensors.items():
        numbers[name] = 1 + held // (FILE_BYTES * num_ranks)
        held += tensor.numel() * tensor.element_size()
    return HuggingFaceStorageWriter(str(folder), numbers, save_distributed=True)


def reason_of(error: BaseException) -> str:
    """Say in one line what went wrong, on the first rank where torch collects it from all."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return first_line(error)


@contextmanager
def as_write_error(target: Path, kept: str) -> Iterator[None]:
    """Say of an error which folder could not be written, and what is kept.

    Raises:
        OSError: there was one.
        RuntimeError: it was one, as where another rank is gone: a job restarts after these.
    """
    try:
        yield
    except (OSError, RuntimeError, CheckpointException) as error:
        kind = RuntimeError if isinstance(error, RuntimeError) else OSError
        raise kind(
            f"{target} could not be written ({reason_of(error)}): {kept} stays; mend this and start the same command "
            "again"
        ) from error


@contextmanager
def as_damage(folder: Path) -> Iterator[None]:
    """Say of an error of torch.distributed.checkpoint or safetensors which folder could not be read, and what to do.

    Raises:
        ValueError: there was one.
    """
    try:
        yield
    except (CheckpointException, SafetensorError) as error:
        raise ValueError(f"{folder} is damaged ({reason_of(error)}); {REMEDY}") from error
