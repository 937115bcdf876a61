"""Base of the sources whose documents are drawn by chance, each a function of split, seed and its number."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, get_args

import numpy as np
from datasets import IterableDataset

from dmc.data.code import Split
from dmc.data.sources import Document, DocumentSource


class DrawnSource(DocumentSource):
    """Documents that are drawn where they are read; a subclass is a dataclass of the settings that they follow from."""

    kind: ClassVar[str]
    """What the documents are called in a description."""
    per_shard: ClassVar[int]
    """Documents in a shard of the stream."""
    split: Split
    seed: int

    def __post_init__(self) -> None:
        if self.split not in get_args(Split):
            raise ValueError(f"split={self.split!r} is unknown; choose one of {list(get_args(Split))}.")
        super().__post_init__()

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        raise NotImplementedError

    def draw(self, number: int) -> tuple[str, ...]:
        """Draw the document of this number: a text, or prompts and completions in turn."""
        raise NotImplementedError

    def generator(self, number: int) -> np.random.Generator:
        """Return the source of randomness of a document."""
        return np.random.default_rng([self.seed, get_args(Split).index(self.split), number])

    def check(self) -> None:
        """Nothing can be missing."""

    def description(self) -> dict[str, Any]:
        """Return the settings, and a hash of the first documents, which follows the code that draws them."""
        first = "\0".join(part for number in range(min(self.num_documents, 8)) for part in self.draw(number))
        options = {name: value for name, value in vars(self).items() if name != "weight"}
        return {self.kind: options, "begins": hashlib.sha256(first.encode()).hexdigest()[:16]}

    def stream(self) -> IterableDataset:
        """Stream the documents, some hundreds in a shard."""
        starts = list(range(0, self.num_documents, self.per_shard))
        return IterableDataset.from_generator(_rows, gen_kwargs={"source": self, "starts": starts})

    def read(self, rows: Iterable[dict[str, Any]]) -> Iterator[Document]:
        """Yield the document of each row: a text alone as itself."""
        return (tuple(row["parts"]) if self.has_loss_mask else row["parts"][0] for row in rows)


def _rows(source: DrawnSource, starts: list[int]) -> Iterator[dict[str, list[str]]]:
    for start in starts:
        for number in range(start, min(start + source.per_shard, source.num_documents)):
            yield {"parts": list(source.draw(number))}
