"""Allowed values of settings, declared at the fields; each violation gives one message."""

from __future__ import annotations

import functools
import math
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal


@dataclass(frozen=True)
class Bounds:
    """Allowed range of a number; True and False are no numbers."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    whole: bool = False
    """Whether only whole numbers of type int are allowed."""
    note: str = ""
    """Meaning of the number, or reason of the bounds."""

    def check(self, name: str, value: Any) -> None:
        """Refuse a value that is no finite number within the bounds.

        Raises:
            ValueError: the value is out of bounds; the message names it and what was expected.
        """
        is_number = isinstance(value, int if self.whole else (int, float)) and not isinstance(value, bool)
        if is_number and self.least <= value <= self.most and self.above < value < self.below and math.isfinite(value):
            return
        raise ValueError(f"{name}={value!r}: expected {self}")

    def __str__(self) -> str:
        sides = ((">=", self.least), (">", self.above), ("<=", self.most), ("<", self.below))
        limits = [f"{sign} {limit:,.12g}".replace(",", "") for sign, limit in sides if math.isfinite(limit)]
        words = ["a whole number" if self.whole else "a number", *([" and ".join(limits)] if limits else [])]
        return " ".join(words) + (f" ({self.note})" if self.note else "")


Count = Annotated[int, Bounds(least=1, whole=True)]
Share = Annotated[float, Bounds(least=0, most=1)]


def check_fields(owner: Any, prefix: str = "") -> None:
    """Check fields of a dataclass against their annotations: `bool`s, `Literal`s, and the `Bounds` of each number.

    Args:
        owner: the dataclass, with fields such as `steps: Annotated[int, Bounds(least=1)] | None`.
        prefix: prefix of field names in messages, such as `training.`.
    Raises:
        ValueError: a value is not allowed; the message names it and what was expected.
    """
    kind: Any = type(owner)
    for name, hint in _annotations(kind).items():
        _check(hint, prefix + name, getattr(owner, name))


@functools.cache
def _annotations(owner: Any) -> dict[str, Any]:
    return typing.get_type_hints(owner, include_extras=True)


def _check(hint: Any, name: str, value: Any) -> None:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        for bounds in hint.__metadata__:
            bounds.check(name, value)
    elif hint is bool and not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: expected true or false")
    elif origin is Literal and value not in parts:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(str, parts))}")
    elif origin in (typing.Union, types.UnionType) and value is not None:
        for part in parts:
            _check(part, name, value)
