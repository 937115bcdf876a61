"""The model that a run starts from, as its gates name it."""

from __future__ import annotations

from pathlib import Path

from dmc.data import local_copy
from dmc.models.adapter_folder import Base
from dmc.training.config import RunConfig


def base_of(config: RunConfig) -> Base:
    """Describe the model that a run starts from, on which it learns its gates."""
    name = str(config.model)
    return Base.of(name, Path(local_copy(name, config.revision)), config.revision)
