"""Kernel backends, one module each with the same function names; `reference` is the specification."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

BACKENDS = ("reference", "cpu")


def load_backend(name: str, device: torch.device | str = "cpu") -> ModuleType:
    """Return the backend module; "auto" picks the best one for tensors on `device`.

    Raises:
        ValueError: there is no such backend.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"kernels={name!r} is unknown: expected 'auto' or one of {', '.join(BACKENDS)}")
    if name == "auto":
        name = "cpu" if torch.device(device).type == "cpu" else "reference"
    return importlib.import_module(f"dmc.kernels.{name}")
