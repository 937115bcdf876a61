"""Numbers of a configuration and the bounds they must keep: one message for each that does not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bounds:
    """What a number may be; True and False are none."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    whole: bool = False
    """Only whole numbers, of type int."""
    note: str = ""
    """What the number is, or why the bounds are there."""

    def check(self, name: str, value: Any) -> None:
        """Refuse what is no finite number within the bounds.

        Raises:
            ValueError: it is not; the message names it and what was expected.
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


COUNT = Bounds(least=1, whole=True)
SHARE = Bounds(least=0, most=1)


def check_fields(owner: Any, prefix: str, bounds: Mapping[str, Bounds]) -> None:
    """Check fields of a dataclass: a number, each number of a list, or None where the field's type has it.

    Args:
        owner: has the fields.
        prefix: stands before a field's name in messages, `training.`.
        bounds: of each field, by its name.
    Raises:
        ValueError: see `Bounds.check`.
    """
    types = {item.name: str(item.type) for item in dataclasses.fields(owner)}
    for name, each in bounds.items():
        value = getattr(owner, name)
        if value is None and "None" in types[name]:
            continue
        for number in value if types[name].startswith(("list", "tuple")) else [value]:
            each.check(prefix + name, number)
