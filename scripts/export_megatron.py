"""Make a Megatron checkpoint of a Llama: python scripts/export_megatron.py model.path=DIR output=DIR tensor_size=4."""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="../configs", config_name="export_megatron")
def main(settings: DictConfig) -> None:
    from dmc.megatron import export_checkpoint

    try:
        folder = export_checkpoint(
            Path(settings.model.path),
            Path(settings.output),
            tensor_size=settings.tensor_size,
            vocab_multiple=settings.vocab_multiple,
            overwrite=settings.overwrite,
        )
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"exported {folder}")


if __name__ == "__main__":
    main()
