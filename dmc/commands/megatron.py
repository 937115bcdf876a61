"""Settings of checkpoints of Megatron-LM that come in or go out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import StrictBool

from dmc.config.settings import Count, OutputFolder, checked_dataclass
from dmc.gguf import ModelName
from dmc.megatron import export_checkpoint, import_checkpoint


@checked_dataclass(frozen=True)
class ImportConfig:
    """A checkpoint of Megatron-LM that becomes a Hugging Face folder."""

    checkpoint: str
    output: OutputFolder
    tokenizer: ModelName | None = None
    """Folder, hub name or GGUF file, saved beside the weights."""
    vocab_size: Count | None = None
    """Tokens without padding; None: the tokenizer's, else the checkpoint's."""
    args: dict[str, Any] | None = None
    """Megatron's arguments that the checkpoint lacks or has wrong."""
    overwrite: StrictBool = False

    def run(self) -> Path:
        """Import it and return the folder."""
        return import_checkpoint(
            Path(self.checkpoint),
            Path(self.output),
            arguments=self.args,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            overwrite=self.overwrite,
        )


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
