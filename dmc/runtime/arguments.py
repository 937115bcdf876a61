"""Checks of callers' arguments: each returns a value of the right kind or raises one error that names the expected."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable
from numbers import Real
from typing import Any


def whole_number(name: str, value: Any, least: int = 1, most: int | None = None, also: str = "") -> int:
    """Return a whole number, NumPy's and torch's included, as an int.

    Args:
        name: name of the argument.
        value: its value.
        least: smallest allowed number.
        most: largest allowed number; None: any.
        also: other allowed values, for the error.
    Raises:
        ValueError: the value is no whole number, or out of range.
    """
    number = index_of(value)
    if number is None or number < least or (most is not None and number > most):
        limits = f">= {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}={_shown(value)}: expected a whole number {limits}{also}")
    return number


def index_of(value: Any) -> int | None:
    """Return an integer of any library (no float, no bool) as an int, else None."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):  # the latter from tensors
        return None


def real_number(name: str, value: Any, expected: str) -> float:
    """Return a finite number as a float.

    Args:
        name: name of the argument.
        value: its value.
        expected: allowed values, for the error.
    Raises:
        ValueError: the value is no finite number.
    """
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}={_shown(value)}: expected {expected}")
    return number


def listed(name: str, value: Any, of: str) -> list[Any]:
    """Return the items of a list or another collection; a string is not accepted.

    Raises:
        TypeError: it is none.
    """
    if isinstance(value, str | bytes | dict) or not isinstance(value, Collection | Iterable):
        raise TypeError(f"{name}={_shown(value)}: expected a list of {of}")
    return list(value)


def of_kind(name: str, value: Any, kind: type, example: str) -> Any:
    """Return the value if it is an instance of a class.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name}={_shown(value)}: expected {example}")
    return value


def _shown(value: Any) -> str:
    """Show a value in one line that is not too long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
