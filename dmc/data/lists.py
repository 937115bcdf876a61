"""Lists and tables drawn by chance, part of which is asked for again: names and numbers that no model can guess."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import numpy as np
from datasets import IterableDataset

from dmc.data.code import Split
from dmc.data.sources import Document, DocumentSource

_PER_SHARD = 512
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
class ListSource(DocumentSource):
    """Lists of random names and values; some of the rows come again in another order. A function of split and seed."""

    split: Split = "train"
    lists: int = 4000
    """Number of lists."""
    longest: int = 40
    """Rows of the longest one."""
    seed: int = 0
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.split not in get_args(Split):
            raise ValueError(f"split={self.split!r} is unknown; choose one of {list(get_args(Split))}.")
        if self.lists < 1 or self.longest < 4:
            raise ValueError(f"lists={self.lists}, longest={self.longest}: expected at least 1 and 4")
        super().__post_init__()

    @property
    def label(self) -> str:
        """For messages and file names."""
        return f"lists:{self.split}"

    def check(self) -> None:
        """Nothing can be missing."""

    def description(self) -> dict[str, Any]:
        """Return the settings, and a hash of the first lists, which follows the code that writes them."""
        first = "\0".join(draw_list(self, number) for number in range(min(self.lists, 8)))
        options = {name: getattr(self, name) for name in ("split", "lists", "longest", "seed")}
        return {"lists": options, "begins": hashlib.sha256(first.encode()).hexdigest()[:16]}

    def num_bytes(self) -> int:
        """Return the approximate size: 24 characters a row, half of them twice."""
        return self.lists * 36 * (self.longest + 4) // 2

    def stream(self) -> IterableDataset:
        """Stream the lists, some hundreds in a shard."""
        starts = list(range(0, self.lists, _PER_SHARD))
        return IterableDataset.from_generator(_rows, gen_kwargs={"source": self, "starts": starts})

    def read(self, rows: Iterable[dict[str, Any]]) -> Iterator[Document]:
        """Yield the text of each row."""
        return (row["text"] for row in rows)


def draw_list(source: ListSource, number: int) -> str:
    """Draw a list, and some of its rows again, in the same form or another one."""
    draw = np.random.default_rng([source.seed, get_args(Split).index(source.split), number])
    words = nouns()
    rows = [
        (" ".join(draw.choice(words, size=draw.integers(1, 3)).tolist()), _value(draw, words))
        for _ in range(int(draw.integers(4, source.longest + 1)))
    ]
    again = [rows[place] for place in draw.permutation(len(rows))[: int(draw.integers(1, len(rows) + 1))]]
    first, second = draw.integers(len(FORMS), size=2)
    return f"{FORMS[first](rows)}\n\n{FORMS[first if draw.random() < 0.5 else second](again)}\n"


def _value(draw: np.random.Generator, words: tuple[str, ...]) -> str:
    kind = int(draw.integers(4))
    if kind == 0:
        return str(draw.choice(words))
    if kind == 1:
        return bytes(draw.integers(256, size=4, dtype=np.uint8)).hex()
    return str(draw.integers(10 ** int(draw.integers(1, 7))))


def _rows(source: ListSource, starts: list[int]) -> Iterator[dict[str, str]]:
    for start in starts:
        for number in range(start, min(start + _PER_SHARD, source.lists)):
            yield {"text": draw_list(source, number)}
