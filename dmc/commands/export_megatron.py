"""Export a Llama as a checkpoint of Megatron-LM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import StrictBool

from dmc.config import build_config
from dmc.config.settings import Count, OutputFolder, checked_dataclass
from dmc.gguf import ModelName
from dmc.megatron import export_checkpoint


@checked_dataclass(frozen=True)
class ExportConfig:
    """A Llama that becomes a checkpoint of Megatron-LM."""

    model: ModelName
    """Folder or GGUF file of a stock or compressed Llama."""
    output: OutputFolder
    tensor_size: Count = 1
    """Tensor-parallel ranks."""
    vocab_multiple: Count = 128
    """Rows of each rank's embedding are a multiple of this (--make-vocab-size-divisible-by)."""
    overwrite: StrictBool = False

    def run(self) -> Path:
        """Export it and return the folder."""
        return export_checkpoint(
            Path(self.model),
            Path(self.output),
            tensor_size=self.tensor_size,
            vocab_multiple=self.vocab_multiple,
            overwrite=self.overwrite,
        )


def main(settings: Any) -> None:
    """Export, and say where."""
    print(f"exported {build_config(ExportConfig, settings).run()}")
