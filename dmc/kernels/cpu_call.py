"""Call the compiled CPU kernels: each takes one structure of 8-byte fields."""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmc.kernels.cpu_build import load_library

SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""Dtypes of compiled kernels, and the ends of their names."""


def call(name: str, *given: Any) -> None:
    """Run a compiled function, which takes a structure with these fields: tensors, arrays (by address) and numbers.

    Raises:
        ValueError: an index is out of bounds; nothing has changed.
    """
    library = load_library()
    assert library is not None
    numbers = [  # most are one of three kinds: a call of `_field` for all would take as long as the rest
        n if type(n) is int else 0 if n is None else n.data_ptr() if isinstance(n, Tensor) else _field(n) for n in given
    ]
    fields = struct.pack(f"={len(numbers)}q", *numbers)  # an array of ctypes takes five times as long
    if (problem := _function(library, name)(fields)) is not None:
        raise ValueError(f"kernels.cpu: {problem.decode()}; nothing has changed")


def _field(given: ctypes.Array[ctypes.c_int64] | float) -> int:
    """Return the 8 bytes of a field as a number."""
    if isinstance(given, float):
        return int.from_bytes(struct.pack("=d", given), sys.byteorder, signed=True)
    return given if isinstance(given, int) else ctypes.addressof(given)


@functools.cache
def _function(library: ctypes.CDLL, name: str) -> Callable[..., bytes | None]:
    function = getattr(library, name)
    function.restype = ctypes.c_char_p
    return function
