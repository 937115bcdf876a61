"""Average a stock model's KV heads: python scripts/merge_heads.py model.path=DIR num_key_value_heads=8 output=DIR."""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from dmc.export import ModelCard, export, refuse_occupied
from dmc.loading import load_with_tokenizer
from dmc.models import merge_kv_heads


@hydra.main(version_base="1.3", config_path="../configs", config_name="merge_heads")
def main(settings: DictConfig) -> None:
    base, output = settings.model.path, Path(settings.output)
    try:
        refuse_occupied(output, settings.overwrite)
        model, tokenizer = load_with_tokenizer(base, settings.model.dtype, settings.model.revision)
        heads = model.config.num_key_value_heads
        merge_kv_heads(model, settings.num_key_value_heads)
        title = f"{Path(base).name} with {settings.num_key_value_heads} KV heads of {heads}"
        export(model, output, tokenizer=tokenizer, card=ModelCard(title, base, "none"), overwrite=settings.overwrite)
    except (ValueError, FileNotFoundError, FileExistsError) as error:
        sys.exit(f"error: {error}")
    print(f"exported {output}")


if __name__ == "__main__":
    main()
