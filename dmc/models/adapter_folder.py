"""Folders of gates alone, as PEFT has them of its adapters: what was learned, and which base it belongs to."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dmc.files import read_mapping
from dmc.models.adapter import OF_ADAPTERS
from dmc.models.weights import (
    BASE_KEYS,
    GATES_NAME,
    INDEX_NAME,
    find_base,
    is_adapter,
    local_folder,
    open_weights,
    weight_files,
    weights_digest,
)

COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Base:
    """The model that gates were learned on."""

    name: str
    """Absolute path, or hub name."""
    revision: str | None
    digest: str

    @classmethod
    def of(cls, name: str, folder: Path, revision: str | None = None) -> Base:
        """Describe a model.

        Args:
            name: folder or hub name; of an adapter, whose own base is taken.
            folder: the folder, or a copy of what the hub has.
            revision: hub revision.
        """
        if is_adapter(folder):
            values = read_mapping(folder / "config.json")
            named, revision, digest = map(values.__getitem__, BASE_KEYS)
            found = find_base(folder)
            return cls(named if COMMIT.fullmatch(found.name) else str(found.resolve()), revision, digest)
        if Path(name).is_dir():
            return cls(str(folder.resolve()), None, weights_digest(folder))
        return cls(name, folder.name if COMMIT.fullmatch(folder.name) else revision, weights_digest(folder))

    def save_config(self, model: Any, folder: Path, dtype: torch.dtype) -> None:
        """Write the configuration of a compressed model, with the base's name; the base is read in `dtype`."""
        config = copy.deepcopy(model.config)
        named = dict(zip(BASE_KEYS, (self.name, self.revision, self.digest), strict=True))
        name = type(model).__name__.removeprefix("FSDP")
        config.update({"dtype": dtype, "architectures": [name], **named})
        config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)


def of_gates(weights: dict[str, Any]) -> dict[str, Any]:
    """Choose the weights of the gates, in float32."""
    return {name: weight.detach().to(torch.float32) for name, weight in weights.items() if OF_ADAPTERS in name}


def save_gates(model: Any, folder: Path, base: Base) -> None:
    """Write what the gates of a compressed model have added to its base, and which base that is."""
    weights = {name: weight.cpu().contiguous() for name, weight in of_gates(model.state_dict()).items()}
    save_file(weights, folder / GATES_NAME, {"format": "pt"})
    base.save_config(model, folder, model.dtype)


@contextmanager
def whole_folder(name: Any, config: Any = None, revision: str | None = None) -> Iterator[Any]:
    """Make a folder of links with all weights of an adapter, as transformers reads them; any other name is its own.

    Args:
        name: folder or hub name.
        config: what has been read of its configuration.
        revision: hub revision.
    """
    folder = Path(str(name))
    if not folder.is_dir() and hasattr(config, BASE_KEYS[-1]):
        folder = local_folder(str(name), revision)
    if not is_adapter(folder):
        yield name
        return
    with TemporaryDirectory(prefix="dmc_gates_") as made:
        whole = Path(made)
        weight_map: dict[str, str] = {}
        for number, path in enumerate(weight_files(folder)):  # the gates last: a base may have others of its own
            link = whole / f"part-{number:05}.safetensors"
            link.symlink_to(path.resolve())
            with safe_open(path, framework="pt") as tensors:
                weight_map |= dict.fromkeys(tensors.keys(), link.name)
        index = {"metadata": {}, "weight_map": weight_map}
        (whole / INDEX_NAME).write_text(json.dumps(index))
        for path in folder.glob("*.json"):
            (whole / path.name).symlink_to(path.resolve())
        yield whole


def with_base(
    weights: Iterable[tuple[str, Tensor]], config: Any, name: str, revision: str | None = None
) -> Iterable[tuple[str, Tensor]]:
    """Replace the weights that an adapter's folder holds by all of its model's; others stay.

    Args:
        weights: by name, as read from the folder.
        config: the model's configuration, as read from the folder.
        name: folder or hub name.
        revision: hub revision.
    """
    if not hasattr(config, BASE_KEYS[-1]):
        return weights
    return ((key, weight[:]) for key, weight in open_weights(local_folder(name, revision)).items())
