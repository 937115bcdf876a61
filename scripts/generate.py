"""Continue a prompt from the compressed cache: python scripts/generate.py model=DIR prompt='import os'.

A stock model with a training-free policy of configs/policy: policy=h2o budget=4.
A model too large for one device: torchrun --nproc-per-node 2 scripts/generate.py model=DIR prompt='import os'.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from dmc import Engine, SamplingParams, load_model
from dmc.command_line import script
from dmc.loading import load_tokenizer
from dmc.models.tensor_parallel import load_shard
from dmc.policies.from_config import policy_from_config

SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")


def load(settings: DictConfig) -> Any:
    """Load the model, or this process's share of it under torchrun."""
    model = settings.model
    if torch.distributed.is_torchelastic_launched():
        return load_shard(model.path, None if model.dtype == "auto" else getattr(torch, model.dtype))
    return load_model(model.path, dtype=model.dtype, revision=model.revision)


@script("generate")
def main(settings: DictConfig) -> None:
    policy = policy_from_config(OmegaConf.to_container(settings.policy), settings.budget)  # type: ignore[arg-type]
    model = load(settings)
    engine = Engine(
        model,
        load_tokenizer(settings.model.path, settings.model.revision, model.config.vocab_size),
        policy,
        block_size=settings.block_size,
        memory=settings.memory,
        kernels=settings.kernels,
        kv_cache_dtype=settings.kv_cache_dtype,
    )
    params = SamplingParams(**{name: settings[name] for name in SAMPLING}, stop=tuple(settings.stop))
    speaks = engine.cache.layout.ranks.rank == 0
    print(settings.prompt if speaks else "", end="")
    for event in engine.stream(settings.prompt, params):
        print(event.text if speaks else "", end="", flush=True)
    if speaks and event.request.generation:
        stats = event.request.generation.stats
        ratio, used = f"CR {stats.achieved_ratio:.2f}", f"{stats.bytes_used:,} bytes used"
        print(
            f"\n\n[{stats.tokens_seen} tokens, {ratio}, {used}, {stats.bytes_allocated:,} allocated]", file=sys.stderr
        )


if __name__ == "__main__":
    main()
