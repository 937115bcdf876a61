"""Continue a prompt from the compressed cache: python scripts/generate.py model=DIR prompt='import os'.

A stock model with a training-free policy of configs/policy: policy=h2o budget=4.
A model too large for one device: torchrun --nproc-per-node 2 scripts/generate.py model=DIR prompt='import os'.
"""

from __future__ import annotations

import sys
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dmc.config.command_line import script

STORAGE = ("block_size", "memory", "kernels", "kv_cache_dtype")
SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")


def load(settings: DictConfig) -> Any:
    """Load the model, or this process's share of it under torchrun."""
    import torch

    from dmc import load_model
    from dmc.models.tensor_parallel import load_shard

    model = settings.model
    if torch.distributed.is_torchelastic_launched():
        return load_shard(model.path, None if model.dtype == "auto" else getattr(torch, model.dtype))
    return load_model(model.path, dtype=model.dtype, revision=model.revision)


@script("generate")
def main(settings: DictConfig) -> None:
    from dmc import Engine, SamplingParams
    from dmc.models.loading import load_tokenizer
    from dmc.policies.from_config import policy_from_config

    policy = policy_from_config(OmegaConf.to_container(settings.policy), settings.budget)  # type: ignore[arg-type]
    model = load(settings)
    tokenizer = load_tokenizer(settings.model.path, settings.model.revision, model.config.vocab_size)
    engine = Engine(model, tokenizer, policy, **{name: settings[name] for name in STORAGE})
    params = SamplingParams(**{name: settings[name] for name in SAMPLING}, stop=tuple(settings.stop))
    speaks = engine.cache.layout.ranks.rank == 0
    print(settings.prompt if speaks else "", end="")
    for event in engine.stream(settings.prompt, params):
        print(event.text if speaks else "", end="", flush=True)
    if speaks and event.request.generation:
        stats = event.request.generation.stats
        sizes = f"{stats.bytes_used:,} bytes used, {stats.bytes_allocated:,} allocated"
        print(f"\n\n[{stats.tokens_seen} tokens, CR {stats.achieved_ratio:.2f}, {sizes}]", file=sys.stderr)


if __name__ == "__main__":
    main()
