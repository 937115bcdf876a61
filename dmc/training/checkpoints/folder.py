"""One checkpoint: a folder that all ranks write together, with a header that lists its files and detects damage.

Its tensors are written by torch.distributed.checkpoint: every weight once, under the model's own name, and the states
of the optimizer by weight: any number of ranks reads them with any strategy. Its files may name only the classes
that torch writes: no code, and no paths outside the folder.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dmc.checksums import file_damage, list_files
from dmc.ranks import ALONE, Ranks

MODEL_CONFIG = "model_config"
"""Key of the Hugging Face configuration in what Lightning collects for a checkpoint."""
WEIGHTS, OPTIMIZER = "model.", "optimizer."
"""Prefixes of tensors' names: the model's weights, and the optimizer's states."""
HEADER_NAME = "header.json"
TRAINER_STATE = "trainer.pt"
"""File of a checkpoint's other state: counters, callbacks, the position in the text."""
METADATA = ".metadata"
"""File in which torch says where each tensor lies."""
WRITER = re.compile(r"^__(\d+)_")
"""Number in a file's name of the rank that wrote it."""
REMEDY = "put back a copy, or delete the run to start over"
CLASSES_OF_METADATA = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
}
FAILURES = (OSError, RuntimeError, CheckpointException)
"""Errors of writing a folder."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Header:
    """Description of a checkpoint, readable without its weights."""

    global_step: int
    model_config: dict[str, Any]
    files: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Bytes and CRC-32 of each file."""


def on_every_rank(act: Callable[[], Result], ranks: Ranks) -> list[Result]:
    """Act on all ranks together, and return the results of all.

    Raises:
        OSError: one of them failed; on all ranks, for the others would wait for it.
    """
    result, problem, cause = None, None, None
    try:
        result = act()
    except Exception as error:
        cause, problem = error, reason_of(error)
    found: Any = ranks.all_gather_object((result, problem))
    failed = next((each for _, each in found if each is not None), None)
    if failed is not None:
        raise OSError(failed) from cause
    return [each for each, _ in found]


def reason_of(error: BaseException) -> str:
    """Say in one line what went wrong, on the first rank where torch collects it from all."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return str(error).split("\n")[0] or type(error).__name__


@contextmanager
def naming(target: Path, kept: str) -> Iterator[None]:
    """Say of an error which folder could not be written, and what is kept.

    Raises:
        OSError: there was one.
    """
    try:
        yield
    except FAILURES as error:
        raise OSError(
            f"{target} could not be written ({reason_of(error)}): {kept} stays; mend this and start the same command "
            "again"
        ) from error


def write_header(folder: Path, header: Header, ranks: Ranks = ALONE) -> None:
    """Complete a folder whose other files are written; called by all ranks, each of which reads back its own files.

    Raises:
        OSError: on all ranks, where one could not.
    """
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = _listed(ranks.all_gather_object(names)[0], folder, ranks, flush=True)

    def write() -> None:
        if ranks.rank > 0:
            return
        values = dataclasses.asdict(dataclasses.replace(header, files=files))
        (folder / HEADER_NAME).write_text(json.dumps(values | {"checksum": _checksum_of(values)}))
        _flush(folder / HEADER_NAME)

    on_every_rank(write, ranks)


def read_header(folder: Path) -> Header:
    """Read a checkpoint's header, and check that its files have their sizes and contain no code.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it is no checkpoint, holds code, or a file is missing or cut off.
    """
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist: expected a checkpoint, a folder of a run's checkpoints")
    try:
        values = json.loads((folder / HEADER_NAME).read_text())
        checksum = values.pop("checksum")
        files = {name: (int(size), int(each)) for name, (size, each) in values["files"].items()}
        header = Header(values["global_step"], values["model_config"], files)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{folder} is no training checkpoint ({HEADER_NAME}: {type(error).__name__})") from error
    if checksum != _checksum_of(values):
        raise ValueError(f"{folder} is damaged: {HEADER_NAME} has a wrong checksum; {REMEDY}")
    for name, (size, _) in header.files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{folder} is no training checkpoint: its {HEADER_NAME} names {name}, outside of it")
        if damage := file_damage(folder / name, size):
            raise ValueError(f"{folder} is cut off: {name} {damage}; {REMEDY}")
    read_metadata(folder)
    return header


def check_whole(folder: Path, ranks: Ranks = ALONE) -> Header:
    """Read all of a checkpoint and compare it with its checksums; ranks that have met do so together, each a share.

    Raises:
        FileNotFoundError, ValueError: see `read_header`; or bytes are not what was written: on all ranks.
    """
    header = read_header(folder)
    try:
        found = _listed(sorted(header.files), folder, ranks)
    except OSError as error:
        raise ValueError(f"{folder} is damaged: {error}; {REMEDY}") from error
    if damaged := sorted(name for name, each in header.files.items() if found[name] != each):
        raise ValueError(f"{folder} is damaged: {damaged[0]} has a wrong checksum; {REMEDY}")
    return header


def check_fits(folder: Path, model: Any) -> Header:
    """Return the header of a checkpoint after checking that it fits a model whose weights are whole.

    Raises:
        FileNotFoundError, ValueError: see `read_header`; or a weight is missing, unexpected, or of another shape.
    """
    header = read_header(folder)
    stored = {name: tuple(each.size) for name, each in read_metadata(folder, WEIGHTS).items()}
    expected = {name: tuple(value.shape) for name, value in weights_of(model).items()}
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
    """Read whole tensors whose names begin with a prefix, by the rest of their names, in their shapes, on the CPU."""
    stored = read_metadata(folder, prefix)
    tensors: dict[str, Any] = {
        prefix + name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in stored.items()
    }
    checkpoint.load(tensors, checkpoint_id=folder, no_dist=True)
    return {name: tensors[prefix + name] for name in stored}


def read_metadata(folder: Path, prefix: str = "") -> dict[str, TensorStorageMetadata]:
    """Read which tensors a folder holds: no other values, for torch would unpickle them.

    Args:
        folder: the checkpoint.
        prefix: of the names to return, which is left out of them.
    Raises:
        ValueError: it is damaged, or names code, a file outside of the folder, or another value.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        found: dict[str, TensorStorageMetadata] = {}
        for name, each in metadata.state_dict_metadata.items():
            if not isinstance(each, TensorStorageMetadata):
                raise TypeError(f"{name} is no tensor")
            if name.startswith(prefix):
                found[name.removeprefix(prefix)] = each
        for place in metadata.storage_data.values():
            if Path(place.relative_path).name != place.relative_path:
                raise ValueError(f"it names {place.relative_path}, outside of the folder")
    except Exception as error:  # whatever unpickling a foreign file comes to
        raise ValueError(f"{path} is damaged or no training checkpoint ({error})") from error
    return found


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the classes of `CLASSES_OF_METADATA` and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """See `pickle.Unpickler`."""
        known = name in CLASSES_OF_METADATA.get(module, ())
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it would run {module}.{name}")


def _listed(names: list[str], folder: Path, ranks: Ranks, flush: bool = False) -> dict[str, tuple[int, int]]:
    """Return bytes and CRC-32 of files; each rank reads those that it wrote, where its number is in the name."""
    writers = [WRITER.search(Path(name).name) for name in names]
    places = [int(writer[1]) if writer else place for place, writer in enumerate(writers)]
    own = [folder / name for name, place in zip(names, places, strict=True) if place % ranks.size == ranks.rank]

    def read() -> dict[str, tuple[int, int]]:
        for path in own if flush else ():
            _flush(path)
        return list_files(folder, own)

    return {name: each for part in on_every_rank(read, ranks) for name, each in part.items()}


def _checksum_of(values: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def _flush(path: Path) -> None:
    """Wait until a file is on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
