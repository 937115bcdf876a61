"""Checksums of files: how to tell that what is read is what was written."""

from __future__ import annotations

import os
import struct
import zipfile
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
    with _threads() as threads:
        return dict(zip(paths, threads.map(file_checksum, paths), strict=True))


def damaged_entry(path: Path) -> str | None:
    """Name an entry of a zip archive, as `torch.save` writes them, that is not what its own CRC-32 says; None: none.

    Raises:
        OSError: the file cannot be read.
    """

    def is_damaged(name: str) -> bool:
        try:
            with archive.open(name) as entry:
                while entry.read(_BLOCK_BYTES):
                    pass
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, struct.error, zlib.error):
            return True
        return False

    try:
        with zipfile.ZipFile(path) as archive, _threads() as threads:
            names = archive.namelist()
            return next((name for name, bad in zip(names, threads.map(is_damaged, names), strict=True) if bad), None)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, struct.error, ValueError):
        return "the table of contents"


def file_damage(path: Path, num_bytes: int, checksum: int | None = None) -> str | None:
    """Say what is wrong with a file, None if it has so many bytes and, where one is given, this checksum.

    Raises:
        OSError: the file cannot be read.
    """
    found = path.stat().st_size if path.is_file() else None
    if found != num_bytes:
        return f"has {'no' if found is None else found} bytes, expected {num_bytes}"
    return None if checksum is None or file_checksum(path) == checksum else "has a wrong checksum"


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1))
