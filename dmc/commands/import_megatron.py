"""Import a checkpoint of Megatron-LM as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import StrictBool

from dmc.config import build_config
from dmc.config.settings import Count, OutputFolder, checked_dataclass
from dmc.gguf import ModelName
from dmc.megatron import import_checkpoint


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


def main(settings: Any) -> None:
    """Import, and say where."""
    print(f"imported {build_config(ImportConfig, settings).run()}")
