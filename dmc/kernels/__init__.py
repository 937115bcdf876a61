"""Kernel backends, one module each with the same function names; `reference` is the specification."""

from __future__ import annotations

import importlib
from types import ModuleType

BACKENDS = ("reference",)


def load_backend(name: str) -> ModuleType:
    """Return the backend module; "auto" picks the best one that runs here.

    Raises:
        ValueError: there is no such backend.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"kernels={name!r} is unknown: expected 'auto' or one of {', '.join(BACKENDS)}")
    return importlib.import_module(f"dmc.kernels.{'reference' if name == 'auto' else name}")
