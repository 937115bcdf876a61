"""Lists and tables drawn by chance, part of which is asked for again: names and numbers that no model can guess."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from dmc.data.code import Split
from dmc.data.drawn import DrawnSource

_PICTURES = range(0x1F300, 0x1FB00)
"""Code points whose names are everyday things: tomato, lighthouse, snail."""

Row = tuple[str, str]


@cache
def nouns() -> tuple[str, ...]:
    """Return words that Unicode names pictures with."""
    names = (unicodedata.name(chr(point), "") for point in _PICTURES)
    return tuple(sorted({word.lower() for name in names for word in name.split() if word.isalpha() and len(word) > 2}))


def _numbered(rows: list[Row]) -> str:
    return "\n".join(f"{place}. {name}: {value}" for place, (name, value) in enumerate(rows, 1))


def _table(rows: list[Row]) -> str:
    return "\n".join(["| item | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _commas(rows: list[Row]) -> str:
    return "\n".join(["item,value", *(f"{name},{value}" for name, value in rows)])


def _mapping(rows: list[Row]) -> str:
    return "{\n" + ",\n".join(f'  "{name}": "{value}"' for name, value in rows) + "\n}"


def _sentences(rows: list[Row]) -> str:
    return " ".join(f"The {name} has {value}." for name, value in rows)


def _settings(rows: list[Row]) -> str:
    return "\n".join(f"{name.replace(' ', '_').upper()}={value}" for name, value in rows)


FORMS: tuple[Callable[[list[Row]], str], ...] = (_numbered, _table, _commas, _mapping, _sentences, _settings)


@dataclass(frozen=True)
class ListSource(DrawnSource):
    """Lists of random names and values; some of the rows come again in another order. A function of split and seed."""

    kind: ClassVar = "lists"
    per_shard: ClassVar = 512

    split: Split = "train"
    lists: int = 4000
    """Number of lists."""
    longest: int = 40
    """Rows of the longest one."""
    seed: int = 0
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.lists < 1 or self.longest < 4:
            raise ValueError(f"lists={self.lists}, longest={self.longest}: expected at least 1 and 4")
        super().__post_init__()

    @property
    def label(self) -> str:
        """For messages and file names."""
        return f"lists:{self.split}"

    @property
    def num_documents(self) -> int:
        """Number of lists."""
        return self.lists

    def num_bytes(self) -> int:
        """Return the approximate size: 24 characters a row, half of them twice."""
        return self.lists * 36 * (self.longest + 4) // 2

    def draw(self, number: int) -> tuple[str]:
        """Draw a list, and some of its rows again, in the same form or another one."""
        draw, words = self.generator(number), nouns()
        rows = [
            (" ".join(draw.choice(words, size=draw.integers(1, 3)).tolist()), _value(draw, words))
            for _ in range(int(draw.integers(4, self.longest + 1)))
        ]
        again = [rows[place] for place in draw.permutation(len(rows))[: int(draw.integers(1, len(rows) + 1))]]
        first, second = draw.integers(len(FORMS), size=2)
        return (f"{FORMS[first](rows)}\n\n{FORMS[first if draw.random() < 0.5 else second](again)}\n",)


def _value(draw: np.random.Generator, words: tuple[str, ...]) -> str:
    kind = int(draw.integers(4))
    if kind == 0:
        return str(draw.choice(words))
    if kind == 1:
        return bytes(draw.integers(256, size=4, dtype=np.uint8)).hex()
    return str(draw.integers(10 ** int(draw.integers(1, 7))))
