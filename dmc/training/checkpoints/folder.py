"""One checkpoint: a folder of every rank's files, with a header that describes them and detects damage.

Its files may name only the classes that torch and DeepSpeed write: no code, and no paths outside the folder.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dmc.checksums import file_damage, list_files

MODEL_CONFIG = "model_config"
"""Key of the Hugging Face configuration in what Lightning collects for a checkpoint."""
SHARDED = "sharded"
"""Format of all strategies but DeepSpeed's, whose format is the strategy's name."""
HEADER_NAME = "header.json"
WRITER = re.compile(r"(?:^__|zero_pp_rank_)(\d+)_")
"""Number in a file's name of the rank that wrote it, in torch's folders and in DeepSpeed's."""
REMEDY = "put back a copy, or delete the run to start over"
TAG = "checkpoint"
"""Folder that Lightning's DeepSpeed checkpoints lie in."""
METADATA = ".metadata"
"""File in which torch says where each tensor lies."""
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
CLASSES_OF_DEEPSPEED = (
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
)


@dataclass(frozen=True)
class Header:
    """Description of a checkpoint, readable without its weights."""

    format: str
    """`SHARDED`, or the name of a DeepSpeed strategy."""
    num_ranks: int
    """Number of ranks that wrote it."""
    global_step: int
    model_config: dict[str, Any]
    shapes: dict[str, list[int]]
    """Shape of each whole weight, under the model's own name."""
    tied: dict[str, str]
    """Names of weights that are stored once, under another name."""
    files: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Bytes and CRC-32 of each file."""

    @classmethod
    def of(cls, format: str, checkpoint: dict[str, Any], model: Any) -> Header:
        """Describe Lightning's checkpoint before its files are written."""
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
    """Complete a folder whose other files are written; called by all ranks, each of which reads back its own files.

    Raises:
        OSError: on all ranks, where one could not.
    """
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files, problem = _each_its_own(gathered(names, group)[0], folder, group, flush=True)
    if problem is None and (not dist.is_initialized() or dist.get_rank() == 0):
        values = dataclasses.asdict(dataclasses.replace(header, files=files))
        try:
            (folder / HEADER_NAME).write_text(json.dumps(values | {"checksum": _checksum_of(values)}))
            _flush(folder / HEADER_NAME)
        except OSError as error:
            problem = str(error)
    problem = next((each for each in gathered(problem, group) if each is not None), None)
    if problem is not None:
        raise OSError(problem)


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
        values["files"] = {name: (int(size), int(each)) for name, (size, each) in values["files"].items()}
        header = Header(**values)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{folder} is no training checkpoint ({HEADER_NAME}: {type(error).__name__})") from error
    if checksum != _checksum_of(values):
        raise ValueError(f"{folder} is damaged: {HEADER_NAME} has a wrong checksum; {REMEDY}")
    for name, (size, _) in header.files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{folder} is no training checkpoint: its {HEADER_NAME} names {name}, outside of it")
        if damage := file_damage(folder / name, size):
            raise ValueError(f"{folder} is cut off: {name} {damage}; {REMEDY}")
    refuse_code(folder, header.format)
    return header


def check_whole(folder: Path, group: Any = None) -> Header:
    """Read all of a checkpoint and compare it with its checksums; ranks that have met do so together, each a share.

    Raises:
        FileNotFoundError, ValueError: see `read_header`; or bytes are not what was written: on all ranks.
    """
    header = read_header(folder)
    found, problem = _each_its_own(sorted(header.files), folder, group)
    damaged = sorted(name for name, each in header.files.items() if found.get(name) != each)
    if problem is None and damaged:
        problem = f"{damaged[0]} has a wrong checksum"
    if problem is not None:
        raise ValueError(f"{folder} is damaged: {problem}; {REMEDY}")
    return header


def check_fits(folder: Path, model: Any, format: str = SHARDED) -> Header:
    """Return the header of a checkpoint after checking that it fits a model.

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
    """Return the shape of a weight over all ranks: DeepSpeed's ZeRO-3 leaves an empty tensor in its place."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _each_its_own(
    names: list[str], folder: Path, group: Any, flush: bool = False
) -> tuple[dict[str, tuple[int, int]], str | None]:
    """Let each rank read its own files, and share their bytes, CRC-32 and any error with all ranks."""
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    writers = [WRITER.search(Path(name).name) for name in names]
    places = [int(writer[1]) if writer else place for place, writer in enumerate(writers)]
    own = [folder / name for name, place in zip(names, places, strict=True) if place % size == rank]
    result: tuple[dict[str, tuple[int, int]], str | None]
    try:
        for path in own if flush else ():
            _flush(path)
        result = list_files(folder, own), None
    except OSError as error:  # a rank that ended here would leave the others waiting
        result = {}, str(error)
    parts = gathered(result, group)
    merged = {name: each for part, _ in parts for name, each in part.items()}
    return merged, next((problem for _, problem in parts if problem is not None), None)


def _checksum_of(values: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def _flush(path: Path) -> None:
    """Wait until a file is on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def refuse_code(folder: Path, format: str) -> None:
    """Check that reading a folder runs nothing and reads nothing outside it: both libraries unpickle what they find.

    Raises:
        ValueError: a file names something else than these libraries write.
    """
    if not format.startswith("deepspeed_"):
        read_metadata(folder)
        return
    latest = folder / "latest"  # names the folder that DeepSpeed reads
    if latest.is_file() and latest.read_text().strip() != TAG:
        raise ValueError(f"{folder} is no training checkpoint: its file latest names another folder than {TAG}")
    for path in sorted(folder.rglob("*.pt")):
        try:
            named = set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - set(CLASSES_OF_DEEPSPEED)
        except (ValueError, RuntimeError, OSError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path} is damaged or no training checkpoint ({type(error).__name__})") from error
        if named:
            raise ValueError(f"{path} would run {', '.join(sorted(named))}: only what DeepSpeed writes is read")


def read_metadata(folder: Path) -> Metadata:
    """Read which tensors a folder holds, and where: no other values, for torch would unpickle them.

    Raises:
        ValueError: it is damaged, or names code, a file outside of the folder, or another value.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        for name, each in metadata.state_dict_metadata.items():
            if not isinstance(each, TensorStorageMetadata):
                raise TypeError(f"{name} is no tensor")
        for place in metadata.storage_data.values():
            if Path(place.relative_path).name != place.relative_path:
                raise ValueError(f"it names {place.relative_path}, outside of the folder")
    except Exception as error:  # whatever unpickling a foreign file comes to
        raise ValueError(f"{path} is damaged or no training checkpoint ({error})") from error
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the classes of `CLASSES_OF_METADATA` and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """See `pickle.Unpickler`."""
        known = name in CLASSES_OF_METADATA.get(module, ())
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it would run {module}.{name}")
