"""Kernel backends, one module each with the same function names; `reference` is the specification.

Each offers `append_or_merge`, `append_to_ring`, `paged_attention`, `prefill_attention`, `compact`, for policies
`write_metadata`, `read_metadata`, `attention_received`, `add_attention`, `nth_newest`, `eviction_candidate` and
`evict`, and `supports(dtype, head_dim, block_size, device)`, which returns why it cannot serve pages of such a dtype,
or None.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import torch

BACKENDS = ("reference", "cpu", "triton", "flash")


def check_backend(name: str) -> None:
    """Check that there is a backend of this name.

    Raises:
        ValueError: there is none.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"kernels={name!r} is unknown: expected 'auto' or one of {', '.join(BACKENDS)}")


def load_backend(name: str, device: torch.device | str = "cpu") -> ModuleType:
    """Return the backend module; "auto" picks the best one for tensors on `device`.

    Raises:
        ValueError: there is no such backend.
        ImportError: it needs a package that is not installed.
    """
    check_backend(name)
    has_triton = importlib.util.find_spec("triton") is not None
    if name == "auto":
        best = {"cpu": "cpu", "cuda": "triton" if has_triton else "reference"}
        name = best.get(torch.device(device).type, "reference")
    if name == "triton" and not has_triton:
        raise ImportError("kernels='triton' needs triton: pip install triton, or use kernels='reference'")
    return importlib.import_module(f"dmc.kernels.{name}")


def choose_backend(name: str, dtype: torch.dtype, head_dim: int, block_size: int, device: torch.device) -> ModuleType:
    """Return a backend that can serve such a cache; "auto" falls back to the reference.

    Raises:
        ValueError: there is no such backend, or it cannot serve this cache.
        ImportError: it needs a package that is not installed.
    """
    backend = load_backend(name, device)
    reason = backend.supports(dtype, head_dim, block_size, device)
    if reason is None:
        return backend
    if name == "auto":
        return load_backend("reference")
    raise ValueError(f"kernels={name!r} cannot serve this cache: {reason}")
