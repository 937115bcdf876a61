"""The interpreter's own standard library: some megabytes of real text with no network."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from dmc.data.files import file_stamps, read_text, texts_in_shard

logger = logging.getLogger(__name__)

Split = Literal["train", "validation", "calibration", "test"]

_BOUNDS: tuple[tuple[int, Split], ...] = ((90, "train"), (95, "validation"), (97, "calibration"), (100, "test"))
_MIN_FILES = 100
# Left out so that corpora of one Python version are alike and read like code:
_INSTALLED = {"site-packages", "dist-packages", "__pycache__", "__phello__"}
_TESTS = {"test", "tests"}  # absent from Debian; deliberately broken encodings
_OPTIONAL = {"distutils", "ensurepip", "idlelib", "lib2to3", "macholib", "tkinter", "turtledemo"}  # not on every Debian
_TABLES = {"encodings", "pydoc_data"}  # character maps and generated help
_EXCLUDED_FOLDERS = _INSTALLED | _TESTS | _OPTIONAL | _TABLES
_EXCLUDED_FILES = {"sitecustomize.py", "turtle.py", "_distutils_system_mod.py"}


def split_of(relative_path: str) -> Split:
    """Return the split of a file, by a hash of its path: about 90, 5, 2 and 3 % of the files.

    What is chosen by its result is chosen on `validation`; `test` is for reports only.
    """
    bucket = int.from_bytes(hashlib.sha256(relative_path.encode()).digest()[:4], "big") % 100
    return next(split for bound, split in _BOUNDS if bucket < bound)


def _library_files(folder: Path) -> list[tuple[str, Path]]:
    """Return (relative path, path) of the library's files, sorted.

    Raises:
        FileNotFoundError: fewer than 100 files, so that this is no usable corpus.
    """
    found: list[tuple[str, Path]] = []
    for parent, folders, names in os.walk(folder):
        # Pruned here: site-packages below the library may hold ten times its files.
        folders[:] = [name for name in folders if name not in _EXCLUDED_FOLDERS and not name.startswith("config-")]
        for name in names:
            if name.endswith(".py") and name not in _EXCLUDED_FILES and not name.startswith("_sysconfigdata"):
                path = Path(parent, name)
                found.append((path.relative_to(folder).as_posix(), path))
    if len(found) < _MIN_FILES:
        raise FileNotFoundError(
            f"Found {len(found)} standard-library files in {folder}, expected at least {_MIN_FILES}: this Python comes "
            "without its sources. Use text files of your own: TextSource(name='corpus/*.txt')."
        )
    return sorted(found)


@dataclass(frozen=True)
class StandardLibrarySource:
    """One split of the standard library's `*.py` files as documents; the same on every machine with the same Python."""

    split: Split = "train"
    """train, validation, calibration or test (for reports only): about 90, 5, 2 and 3 % of the files."""
    weight: float = 1.0
    """Share in a blend, relative to the other sources, > 0."""
    folder: str | None = None
    """Where the library lies; None: the running interpreter's."""

    def __post_init__(self) -> None:
        if self.split not in get_args(Split):
            raise ValueError(f"split={self.split!r} is unknown; choose one of {list(get_args(Split))}.")
        if not self.weight > 0:
            raise ValueError(f"weight={self.weight} must be > 0; leave the source out.")

    @property
    def label(self) -> str:
        """For messages and file names."""
        return f"stdlib:{self.split}"

    @property
    def _root(self) -> Path:
        return Path(self.folder or sysconfig.get_paths()["stdlib"])

    def files(self) -> list[tuple[str, Path]]:
        """Return (relative path, path) of the split's files, sorted."""
        return [(name, path) for name, path in _library_files(self._root) if split_of(name) == self.split]

    def check(self) -> None:
        """Raise FileNotFoundError if this Python comes without its sources."""
        self.files()

    def description(self) -> dict[str, Any]:
        """Return the Python version and the files' names, sizes and times."""
        stamps = file_stamps([path for _, path in self.files()], relative_to=self._root)
        return {"stdlib": platform.python_version(), "split": self.split, "stamps": stamps}

    def num_bytes(self) -> int:
        """Return the size of the files."""
        return sum(path.stat().st_size for _, path in self.files())

    def documents(self, shard: int = 0, num_shards: int = 1) -> Iterator[str | None]:
        """Yield each file's text, None for one that is not utf-8."""
        return texts_in_shard([path for _, path in self.files()], shard, num_shards)


def stdlib_documents(split: Split) -> Iterator[tuple[str, str]]:
    """Yield (relative path, text) of the standard-library files in a split, sorted by path.

    Args:
        split: "train", "validation", "calibration" or "test": see `split_of`.
    Raises:
        ValueError: the split is unknown.
        FileNotFoundError: this Python comes without its sources.
    """
    num_undecodable = 0
    for name, path in StandardLibrarySource(split).files():
        text = read_text(path)
        if text is None:
            num_undecodable += 1
        else:
            yield name, text
    if num_undecodable:
        logger.warning("stdlib:%s: skipped %d undecodable files.", split, num_undecodable)
