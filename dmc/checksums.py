"""Checksums of files, which detect that a file has changed since it was written."""

from __future__ import annotations

import json
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


def list_files(folder: Path, paths: Iterable[Path]) -> dict[str, tuple[int, int]]:
    """Return bytes and CRC-32 of files by their names in a folder, read at the same time."""
    paths = list(paths)
    with ThreadPoolExecutor(_MOST_THREADS) as threads:
        sums = list(threads.map(file_checksum, paths))
    pairs = zip(paths, sums, strict=True)
    return {path.relative_to(folder).as_posix(): (path.stat().st_size, each) for path, each in pairs}


def write_list(file: Path, paths: Iterable[Path]) -> None:
    """Write atomically a file that lists others of its folder, as `list_files` does."""
    partial = file.with_name(f".{file.name}")
    partial.write_text(json.dumps({"files": list_files(file.parent, paths)}, indent=1) + "\n")
    os.replace(partial, file)


def read_list(file: Path) -> dict[str, tuple[int, int]]:
    """Read what `write_list` has written.

    Raises:
        ValueError: the file is missing or damaged, or names a path outside its folder.
    """
    try:
        files = json.loads(file.read_text())["files"]
        if outside := [name for name in files if Path(name).is_absolute() or ".." in Path(name).parts]:
            raise ValueError(f"it names {outside[0]}, outside of its folder")
        return {str(name): (int(num_bytes), int(checksum)) for name, (num_bytes, checksum) in files.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no list of files ({error})") from error


def file_damage(path: Path, num_bytes: int, checksum: int | None = None) -> str | None:
    """Return the damage of a file, or None if its size and, where given, its checksum are as expected.

    Raises:
        OSError: the file cannot be read.
    """
    found = path.stat().st_size if path.is_file() else None
    if found != num_bytes:
        return f"has {'no' if found is None else found} bytes, expected {num_bytes}"
    return None if checksum is None or file_checksum(path) == checksum else "has a wrong checksum"
