"""Continue a prompt from the compressed cache: python scripts/generate.py model.path=DIR prompt='import os'."""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig
from transformers import AutoTokenizer

from dmc import Engine, SamplingParams, load_model


@hydra.main(version_base="1.3", config_path="../configs", config_name="generate")
def main(settings: DictConfig) -> None:
    try:
        model = load_model(settings.model.path, dtype=settings.model.dtype, revision=settings.model.revision)
        tokenizer = AutoTokenizer.from_pretrained(settings.model.path, trust_remote_code=False)
        params = SamplingParams(
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            seed=settings.seed,
        )
        engine = Engine(model, tokenizer, block_size=settings.block_size, memory=settings.memory)
        (generation,) = engine.generate([settings.prompt], params)
    except (ValueError, FileNotFoundError, NotImplementedError) as error:
        sys.exit(f"error: {error}")
    stats = generation.stats
    print(settings.prompt + (generation.text or ""))
    print(
        f"\n[{stats.tokens_seen} tokens, CR {stats.achieved_ratio:.2f}, {stats.bytes_used:,} bytes used, "
        f"{stats.bytes_allocated:,} allocated]",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
