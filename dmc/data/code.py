"""Python code installed on every machine: some megabytes of real text without a network."""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from datasets import IterableDataset

from dmc.data.sources import DocumentSource, file_stamps, files_digest, stream_texts

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

    Choices are made on `validation`; `test` is for reports only.
    """
    bucket = int.from_bytes(hashlib.sha256(relative_path.encode()).digest()[:4], "big") % 100
    return next(split for bound, split in _BOUNDS if bucket < bound)


class CodeSource(DocumentSource):
    """One split of files of code as documents; a subclass lists the files."""

    split: Split
    """See `split_of`."""

    def __post_init__(self) -> None:
        if self.split not in get_args(Split):
            raise ValueError(f"split={self.split!r} is unknown; choose one of {list(get_args(Split))}.")
        super().__post_init__()

    def files(self) -> list[tuple[str, Path]]:
        """Return (relative path, path) of the split's files, sorted.

        Raises:
            FileNotFoundError: they are not on this machine.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raise FileNotFoundError if the files are not on this machine."""
        self.files()

    def digest(self) -> str:
        """Return a hash of the files."""
        return files_digest([path for _, path in self.files()])

    def num_bytes(self) -> int:
        """Return the size of the files."""
        return sum(path.stat().st_size for _, path in self.files())

    def stream(self) -> IterableDataset:
        """Stream the text of each file that is not empty."""
        return stream_texts([path for _, path in self.files() if path.stat().st_size])


@dataclass(frozen=True)
class StandardLibrarySource(CodeSource):
    """One split of the standard library's `*.py` files as documents; the same on every machine with the same Python."""

    split: Split = "train"
    weight: float = 1.0
    folder: str | None = None
    """Folder of the library; None: the running interpreter's."""

    @property
    def label(self) -> str:
        """For messages and file names."""
        return f"stdlib:{self.split}"

    @property
    def _root(self) -> Path:
        return Path(self.folder or sysconfig.get_paths()["stdlib"])

    def files(self) -> list[tuple[str, Path]]:
        """See `CodeSource`; fewer than 100 files are no usable corpus."""
        files: list[tuple[str, Path]] = []
        for parent, folders, names in os.walk(self._root):
            # Pruned here: site-packages below the library may hold ten times its files.
            folders[:] = [name for name in folders if name not in _EXCLUDED_FOLDERS and not name.startswith("config-")]
            for name in names:
                if name.endswith(".py") and name not in _EXCLUDED_FILES and not name.startswith("_sysconfigdata"):
                    path = Path(parent, name)
                    files.append((path.relative_to(self._root).as_posix(), path))
        if len(files) < _MIN_FILES:
            raise FileNotFoundError(
                f"Found {len(files)} standard-library files in {self._root}, expected at least {_MIN_FILES}: this "
                "Python comes without its sources. Use text files of your own: TextSource(name='corpus/*.txt')."
            )
        return sorted((name, path) for name, path in files if split_of(name) == self.split)

    def description(self) -> dict[str, Any]:
        """Return the Python version and the files' names, sizes and times."""
        stamps = file_stamps([path for _, path in self.files()], relative_to=self._root)
        return {"stdlib": platform.python_version(), "split": self.split, "stamps": stamps}


@dataclass(frozen=True)
class PackageSource(CodeSource):
    """One split of the `*.py` files of installed packages as documents; the same for the same versions."""

    packages: Sequence[str]
    """Names as in `import`: torch, sympy."""
    split: Split = "train"
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.packages or isinstance(self.packages, str):
            raise ValueError(f"packages={self.packages!r}: expected a list of installed packages, such as [sympy]")
        super().__post_init__()
        object.__setattr__(self, "packages", tuple(self.packages))

    @property
    def label(self) -> str:
        """For messages and file names."""
        return f"{'+'.join(self.packages)}:{self.split}"

    def files(self) -> list[tuple[str, Path]]:
        """See `CodeSource`; names begin with the package's, and tests are left out."""
        files: list[tuple[str, Path]] = []
        for root in map(_folder_of, self.packages):
            for path in root.rglob("*.py"):
                name = path.relative_to(root.parent)
                if not (_TESTS | {"testing"}).intersection(name.parts) and split_of(name.as_posix()) == self.split:
                    files.append((name.as_posix(), path))
        return sorted(files)

    def description(self) -> dict[str, Any]:
        """Return the packages' versions and the files' names, sizes and times."""
        stamps = [[name, *file_stamps([path])[0][1:]] for name, path in self.files()]
        return {"packages": {name: _version_of(name) for name in self.packages}, "split": self.split, "stamps": stamps}


def _folder_of(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"The package {package!r} is not installed as a folder of sources: pip install it.")
    return Path(next(iter(spec.submodule_search_locations)))


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # a folder on the path, not installed by pip
        return None
