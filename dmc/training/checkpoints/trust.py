"""What the files of a checkpoint may name: the classes that torch and DeepSpeed write, no code, no way out."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

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
        """See `pickle.Unpickler`.

        Raises:
            pickle.UnpicklingError: something else is named.
        """
        known = name in CLASSES_OF_METADATA.get(module, ())
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it would run {module}.{name}")
