"""Folders of gates alone, as PEFT has them of its adapters: what was learned, and which base it belongs to."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

from dmc.files import read_mapping
from dmc.models.adapter import OF_ADAPTERS
from dmc.models.weights import (
    BASE_KEYS,
    GATES_NAME,
    find_base,
    is_adapter,
    known_digest,
    local_folder,
    open_weights,
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
            return cls(str(folder.resolve()), None, known_digest(folder))
        return cls(name, folder.name if COMMIT.fullmatch(folder.name) else revision, known_digest(folder))

    @property
    def named(self) -> dict[str, Any]:
        """What a configuration says of it."""
        return dict(zip(BASE_KEYS, (self.name, self.revision, self.digest), strict=True))

    def save_config(self, model: Any, folder: Path, dtype: torch.dtype) -> None:
        """Write the configuration of a compressed model, with the base's name; the base is read in `dtype`."""
        config = copy.deepcopy(model.config)
        name = type(model).__name__.removeprefix("FSDP")
        config.update({"dtype": dtype, "architectures": [name], **self.named})
        config.save_pretrained(folder)


def of_gates(weights: dict[str, Any]) -> dict[str, Any]:
    """Choose the weights of the gates, in float32."""
    return {name: weight.detach().to(torch.float32) for name, weight in weights.items() if OF_ADAPTERS in name}


def save_gates(model: Any, folder: Path, base: Base) -> None:
    """Write what the gates of a compressed model have added to its base, and which base that is."""
    weights = {name: weight.cpu().contiguous() for name, weight in of_gates(model.state_dict()).items()}
    save_file(weights, folder / GATES_NAME, {"format": "pt"})
    base.save_config(model, folder, model.dtype)


def adapter_behind(name: Any, config: Any = None, revision: str | None = None) -> Path | None:
    """Return the folder of an adapter of gates; None: the name is that of something else.

    Args:
        name: folder or hub name.
        config: what has been read of a hub name's configuration.
        revision: hub revision.
    """
    folder = Path(str(name))
    if not folder.is_dir() and hasattr(config, BASE_KEYS[-1]):
        folder = local_folder(str(name), revision)
    return folder if is_adapter(folder) else None


def given_weights(folder: Path) -> dict[str, Any]:
    """Return the keywords by which transformers' `from_pretrained` takes all weights of an adapter, without a name."""
    given = {"state_dict": open_weights(folder)}
    if (folder / "generation_config.json").is_file():
        given["generation_config"] = GenerationConfig.from_pretrained(folder)
    return given


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
