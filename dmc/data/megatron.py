"""Token ids written by Megatron-LM's `preprocess_data.py`: `PREFIX.bin` and `PREFIX.idx`, read directly."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import IterableDataset

from dmc.data.hub import once
from dmc.data.packing import TokenArrays, TokenTable
from dmc.data.sources import DocumentSource, file_stamps, files_digest

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = "<9sQBQQ"  # magic, version, type of the ids, number of sequences, number of document boundaries
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_BLOCK_TOKENS = 2**24
"""Tokens whose range is found at once, and is not kept."""


@dataclass(frozen=True)
class MegatronSource(DocumentSource):
    """The documents of one indexed dataset: nothing is tokenized, nothing is put between documents.

    The index gives the ends of documents; whether they have a separator depends on the writer (`--append-eod`).
    """

    prefix: str
    """Path of both files without .bin and .idx."""
    weight: float = 1.0

    @property
    def label(self) -> str:
        """The prefix."""
        return self.prefix

    def check(self) -> None:
        """Raise a clear error if the two files are missing or invalid.

        Raises:
            FileNotFoundError: one of them is missing.
            ValueError: the index is damaged, of another version, or does not belong to the tokens.
        """
        _open(self.prefix)

    def description(self) -> dict[str, Any]:
        """Return the sizes and times of both files."""
        return {"megatron": file_stamps(_paths(self.prefix))}

    def digest(self) -> str:
        """Return a hash of both files."""
        return files_digest(_paths(self.prefix))

    def stream(self) -> IterableDataset:
        """Refuse: there is no text."""
        raise ValueError(
            f"{self.prefix!r} holds token ids, not text: name the tokenizer they were made with (data.tokenizer.path), "
            "and set data.streaming=false"
        )

    def open_tokens(self, vocab_size: int) -> TokenTable:
        """Map the tokens.

        Raises:
            FileNotFoundError, ValueError: see `check`.
        """
        _open(self.prefix)
        return TokenTable(partial(_open, self.prefix))

    def check_ids(self, vocab_size: int, cache_folder: Path) -> None:
        """Read all token ids; the range of many is kept in the cache.

        Raises:
            FileNotFoundError, ValueError: see `check`; or the tokens are those of a larger vocabulary, or negative.
        """
        token_ids = _open(self.prefix).token_ids
        limits = np.iinfo(token_ids.type.to_pandas_dtype())
        if limits.min >= 0 and limits.max < vocab_size:
            return

        def read_range() -> str:
            found = _range_of(token_ids)
            self._refuse(found, vocab_size)
            return json.dumps(found)

        if len(token_ids) <= _BLOCK_TOKENS:
            read_range()
            return

        key = hashlib.sha256(json.dumps(self.description()).encode()).hexdigest()
        self._refuse(json.loads(once(cache_folder / "ranges" / key, read_range)), vocab_size)

    def _refuse(self, found: Sequence[int], vocab_size: int) -> None:
        for number in found:
            if not 0 <= number < vocab_size:
                raise ValueError(
                    f"{self.prefix}.bin holds token {number}, the tokenizer has {vocab_size}: not its text; name the "
                    "tokenizer it was made with, or index the text anew"
                )


def _range_of(token_ids: pa.ChunkedArray) -> list[int]:
    """Return the smallest and the largest of token ids, some at a time."""
    parts = [part.to_numpy() for part in token_ids.chunks]
    blocks = [part[first : first + _BLOCK_TOKENS] for part in parts for first in range(0, len(part), _BLOCK_TOKENS)]
    return [int(min(block.min() for block in blocks)), int(max(block.max() for block in blocks))]


def _paths(prefix: str) -> tuple[Path, Path]:
    return Path(f"{prefix}.idx"), Path(f"{prefix}.bin")


def _open(prefix: str) -> TokenArrays:
    index, tokens = _paths(prefix)
    for path in (index, tokens):
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: prefix={prefix!r} names PREFIX.bin and PREFIX.idx")
    content = np.memmap(index, mode="r") if index.stat().st_size else np.empty(0, dtype=np.uint8)
    size = struct.calcsize(_HEADER)
    if len(content) < size or bytes(content[:9]) != _MAGIC:
        raise ValueError(f"{index} is no index of a Megatron dataset: it does not begin with MMIDIDX")
    _, version, code, num_sequences, num_bounds = struct.unpack(_HEADER, bytes(content[:size]))
    if version != 1 or code not in _DTYPES:
        raise ValueError(f"{index} has version {version} and type {code}: expected version 1 and an integer type")
    if len(content) < size + 12 * num_sequences + 8 * num_bounds:
        raise ValueError(f"{index} is cut off: {len(content)} bytes for {num_sequences} sequences")
    lengths, pointers, bounds = (
        np.frombuffer(content, dtype, count, offset)
        for dtype, count, offset in (
            ("<i4", num_sequences, size),
            ("<i8", num_sequences, size + 4 * num_sequences),
            ("<i8", num_bounds, size + 12 * num_sequences),
        )
    )
    places = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    dtype = np.dtype(_DTYPES[code])
    if not np.array_equal(pointers, places[:-1] * dtype.itemsize):
        raise ValueError(f"{index}: the sequences do not stand one behind the other; write the dataset anew")
    if tokens.stat().st_size != places[-1] * dtype.itemsize or bounds.max(initial=0) > num_sequences:
        raise ValueError(f"{tokens} has {tokens.stat().st_size} bytes, its index tells {places[-1] * dtype.itemsize}")
    if places[-1] == 0:
        raise ValueError(f"{tokens} is empty")
    ends = np.unique(np.append(places[bounds], places[-1]))  # the index begins with boundary 0
    return TokenArrays(pa.chunked_array([np.memmap(tokens, dtype=dtype, mode="r")]), ends[ends > 0])
