"""One flat token array kept in several files: what each holds, how to tell that it is whole, and memory-mapped reading.

A folder holds `00000.bin`, `00001.bin`, ... (token ids one behind the other), `00000.json`, ... (their records) and
`index.json`, which is written when all of them are there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dmc.checksums import file_damage

INDEX_NAME = "index.json"
_CHECKED_BYTES = 2**28  # read at most to verify a folder at every opening; beyond it, of evenly spread shards


@dataclass(frozen=True)
class ShardRecord:
    """What a shard holds and how to tell that it is whole."""

    num_tokens: int
    """Separators included."""
    num_documents: int
    num_empty: int
    """Documents left out because they hold no text."""
    num_undecodable: int
    """Documents left out because they are not utf-8."""
    num_bytes: int
    checksum: int
    """CRC-32 of the file."""


@dataclass(frozen=True)
class ShardIndex:
    """What a whole folder holds."""

    key: str
    """Hash of the source's description and of the tokenizer."""
    dtype: str
    """Stored type of a token id: uint16 or int32."""
    shards: tuple[ShardRecord, ...]

    def total(self, field: str) -> int:
        """Sum a field of the records over all shards."""
        return sum(getattr(shard, field) for shard in self.shards)

    def to_json(self) -> str:
        """Write the index as text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> ShardIndex:
        """Read what `to_json` wrote.

        Raises:
            ValueError, TypeError, KeyError: the text is something else.
        """
        values = json.loads(text)
        return cls(values["key"], values["dtype"], tuple(ShardRecord(**shard) for shard in values["shards"]))


def shard_path(folder: Path, shard: int) -> Path:
    """Return the file of a shard's tokens; its record stands beside it with the suffix `.json`."""
    return folder / f"{shard:05d}.bin"


def damage_of(path: Path, record: ShardRecord) -> str | None:
    """Say what is wrong with a shard's file, None if it is what its record says.

    Raises:
        OSError: the file cannot be read.
    """
    return file_damage(path, record.num_bytes, record.checksum)


def is_whole(folder: Path, index: ShardIndex) -> bool:
    """Check a folder quickly: the size of every shard, and the bytes of all up to 256 MiB, of spread shards beyond."""
    sizes = [record.num_bytes for record in index.shards]
    num_checked = min(len(sizes), max(1, _CHECKED_BYTES * len(sizes) // max(1, sum(sizes))))
    checked = {len(sizes) * place // num_checked for place in range(num_checked)}
    try:
        if any(shard_path(folder, shard).stat().st_size != size for shard, size in enumerate(sizes)):
            return False
        return all(damage_of(shard_path(folder, shard), index.shards[shard]) is None for shard in checked)
    except OSError:
        return False


class TokenShards:
    """Reads the shards of a folder as one flat array; a slice may cross their borders.

    Files are mapped when they are first read, in every process anew: pickling copies the folder's name alone.
    """

    def __init__(self, folder: Path, lengths: Sequence[int], dtype: str) -> None:
        """Take the folder as it is.

        Args:
            folder: holds the shards.
            lengths: tokens of each shard.
            dtype: stored type of a token id.
        """
        self.folder = folder
        self.dtype = np.dtype(dtype)
        self._starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self._maps: dict[int, np.ndarray] = {}

    @property
    def shape(self) -> tuple[int]:
        """Tokens of all shards."""
        return (int(self._starts[-1]),)

    @property
    def ndim(self) -> int:
        """One: the array is flat."""
        return 1

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, step = span.indices(len(self))
        if step != 1:
            raise ValueError(f"a slice of stored tokens has step 1, not {step}")
        parts = [np.empty(0, dtype=self.dtype)]
        while start < stop:
            shard = int(np.searchsorted(self._starts, start, side="right")) - 1  # the last that begins here: not empty
            first, last = self._starts[shard : shard + 2]
            parts.append(self._mapped(shard)[start - first : min(stop, last) - first])
            start = last
        return parts[-1] if len(parts) <= 2 else np.concatenate(parts)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self[:], dtype=dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}

    def _mapped(self, shard: int) -> np.ndarray:
        if shard not in self._maps:
            self._maps[shard] = np.memmap(shard_path(self.folder, shard), dtype=self.dtype, mode="r")
        return self._maps[shard]
