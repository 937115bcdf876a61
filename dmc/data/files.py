"""Documents of local files, cut in shards by the byte at which each begins, so that any shard is read alone.

The files stand one behind the other; shard k of n owns the documents that begin in the k-th of n equal ranges of their
bytes. A text file is one document. Lines of a jsonl file and row groups of a parquet file begin where they stand; the
rows of every other file (json, csv, arrow, compressed) begin with the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from datasets import IterableDataset, load_dataset

COMPRESSED = {".gz", ".zst", ".xz", ".bz2"}
TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py", ".tex", ".html"}
KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}


def kind_of(path: Path) -> str:
    """Return json, parquet, csv, arrow or text, as the file's name says."""
    suffixes = path.suffixes
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes = suffixes[:-1]
    return KINDS.get(suffixes[-1].lower(), "text") if suffixes else "text"


def file_stamps(paths: Iterable[Path], relative_to: Path | None = None) -> list[list[Any]]:
    """Return [path, size in bytes, modification time in ns] of each file."""
    stamps: list[list[Any]] = []
    for path in paths:
        status = path.stat()
        name = path.relative_to(relative_to) if relative_to else path.resolve()
        stamps.append([name.as_posix(), status.st_size, status.st_mtime_ns])
    return stamps


def read_text(path: Path) -> str | None:
    """Return a file's text, or None if it is not utf-8 (a byte order mark is dropped)."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def shard_ranges(files: Sequence[Path], shard: int, num_shards: int) -> Iterator[tuple[Path, int, int]]:
    """Yield (file, first byte, byte after the last) of the parts of files that make up a shard, in the files' order."""
    sizes = [path.stat().st_size + 1 for path in files]  # so that an empty file stands somewhere too
    first, last = (sum(sizes) * bound // num_shards for bound in (shard, shard + 1))
    begin = 0
    for path, size in zip(files, sizes, strict=True):
        start, stop = max(first - begin, 0), min(last - begin, size)
        if start < stop:
            yield path, start, stop
        begin += size


def texts_in_shard(files: Sequence[Path], shard: int, num_shards: int) -> Iterator[str | None]:
    """Yield the text files that begin in a shard, None for one that is not utf-8."""
    return (read_text(path) for path, start, _ in shard_ranges(files, shard, num_shards) if start == 0)


def rows_in_shard(files: Sequence[Path], shard: int, num_shards: int) -> Iterator[dict[str, Any]]:
    """Yield the rows that begin in a shard of json, parquet, csv or arrow files.

    Raises:
        ValueError: a file is not of the kind that its name says.
    """
    for path, start, stop in shard_ranges(files, shard, num_shards):
        if path.suffix.lower() == ".jsonl":
            yield from _lines(path, start, stop)
        elif path.stat().st_size:
            rows = open_rows([path]).reshard()  # a row group of parquet is a shard of its own
            size = path.stat().st_size + 1
            for group in range(rows.num_shards):
                if start <= size * group // rows.num_shards < stop:
                    yield from rows.shard(rows.num_shards, group)


def open_rows(files: Sequence[Path]) -> IterableDataset:
    """Stream the rows of json, parquet, csv or arrow files: no second copy of them is written to any cache."""
    names = [str(path) for path in files]
    kind = kind_of(files[0])
    if kind == "arrow":
        return load_dataset("arrow", data_files=names, split="train", streaming=True)
    return getattr(IterableDataset, f"from_{kind}")(names)


def _lines(path: Path, start: int, stop: int) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        if start:
            file.seek(start - 1)
            file.readline()  # it began before `start`
        while file.tell() < stop and (line := file.readline()):
            if line.strip():
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"a line of {path} is a {type(row).__name__}, expected an object")
                yield row
