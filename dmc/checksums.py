"""Checksums of files: how to tell that what is read is what was written."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_BLOCK_BYTES = 2**20
_MOST_THREADS = 8  # a checksum is as fast as one core reads: several files at once are as fast as the disk


def file_checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            value = zlib.crc32(block, value)
    return value


def file_checksums(paths: Iterable[Path]) -> dict[Path, int]:
    """Return the CRC-32 of several files, read at the same time."""
    paths = list(paths)
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
        return dict(zip(paths, threads.map(file_checksum, paths), strict=True))


def file_damage(path: Path, num_bytes: int, checksum: int | None = None) -> str | None:
    """Say what is wrong with a file, None if it has so many bytes and, where one is given, this checksum.

    Raises:
        OSError: the file cannot be read.
    """
    found = path.stat().st_size if path.is_file() else None
    if found != num_bytes:
        return f"has {'no' if found is None else found} bytes, expected {num_bytes}"
    return None if checksum is None or file_checksum(path) == checksum else "has a wrong checksum"
