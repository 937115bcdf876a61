"""The Python sources of installed packages: tens of megabytes of real text with no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dmc.data.files import file_stamps, texts_in_shard
from dmc.data.stdlib import Split, split_of

_TESTS = {"test", "tests", "testing"}


@dataclass(frozen=True)
class PackageSource:
    """One split of the `*.py` files of installed packages as documents; the same for the same versions.

    Raises:
        ValueError: no package is named, or the weight is not > 0.
    """

    packages: Sequence[str]
    """Names as in `import`: torch, sympy."""
    split: Split = "train"
    """train, validation, calibration or test (for reports only): about 90, 5, 2 and 3 %, by a hash of the path."""
    weight: float = 1.0
    """Share in a blend, relative to the other sources, > 0."""

    def __post_init__(self) -> None:
        if not self.packages or isinstance(self.packages, str):
            raise ValueError(f"packages={self.packages!r}: expected a list of installed packages, such as [sympy]")
        if not self.weight > 0:
            raise ValueError(f"weight={self.weight} must be > 0; leave the source out.")
        object.__setattr__(self, "packages", tuple(self.packages))

    @property
    def label(self) -> str:
        """For messages and file names."""
        return f"{'+'.join(self.packages)}:{self.split}"

    def files(self) -> list[tuple[str, Path]]:
        """Return (path from the package's folder on, path) of the split's files, sorted; tests are left out.

        Raises:
            FileNotFoundError: a package is not installed, or is no folder of sources.
        """
        found: list[tuple[str, Path]] = []
        for package in self.packages:
            root = _folder_of(package)
            for path in root.rglob("*.py"):
                name = path.relative_to(root.parent)
                if not _TESTS.intersection(name.parts) and split_of(name.as_posix()) == self.split:
                    found.append((name.as_posix(), path))
        return sorted(found)

    def check(self) -> None:
        """Raise FileNotFoundError if a package is not installed."""
        self.files()

    def description(self) -> dict[str, Any]:
        """Return the packages' versions and the files' names, sizes and times."""
        stamps = [stamp for package in self.packages for stamp in self._stamps(package)]
        versions = {package: _version_of(package) for package in self.packages}
        return {"packages": versions, "split": self.split, "stamps": stamps}

    def num_bytes(self) -> int:
        """Return the size of the files."""
        return sum(path.stat().st_size for _, path in self.files())

    def documents(self, shard: int = 0, num_shards: int = 1) -> Iterator[str | None]:
        """Yield each file's text, None for one that is not utf-8."""
        return texts_in_shard([path for _, path in self.files()], shard, num_shards)

    def _stamps(self, package: str) -> list[list[Any]]:
        parent = _folder_of(package).parent
        names = [path for name, path in self.files() if name.split("/")[0] == package]
        return file_stamps(names, relative_to=parent)


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
