"""Write a Megatron checkpoint as a Hugging Face folder: python scripts/import_megatron.py checkpoint=DIR output=DIR."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from dmc.config.command_line import script


@script("import_megatron")
def main(settings: DictConfig) -> None:
    from dmc.megatron import import_checkpoint

    folder = import_checkpoint(
        Path(settings.checkpoint),
        Path(settings.output),
        arguments=None if settings.args is None else OmegaConf.to_object(settings.args),
        tokenizer=settings.tokenizer,
        vocab_size=settings.vocab_size,
        overwrite=settings.overwrite,
    )
    print(f"imported {folder}")


if __name__ == "__main__":
    main()
