"""Write a Llama as a Megatron checkpoint: python scripts/export_megatron.py model=DIR output=DIR tensor_size=4."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from dmc.config.command_line import script


@script("export_megatron")
def main(settings: DictConfig) -> None:
    from dmc.megatron import export_checkpoint

    folder = export_checkpoint(
        Path(settings.model.path),
        Path(settings.output),
        tensor_size=settings.tensor_size,
        vocab_multiple=settings.vocab_multiple,
        overwrite=settings.overwrite,
    )
    print(f"exported {folder}")


if __name__ == "__main__":
    main()
