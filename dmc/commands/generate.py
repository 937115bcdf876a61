"""Continue a prompt from the compressed cache, with learned gates or a training-free policy."""

from __future__ import annotations

import sys
from dataclasses import field
from typing import Any

import torch
from pydantic import StrictFloat, StrictInt

from dmc.config.settings import checked_dataclass
from dmc.models import load_model
from dmc.models.loading import load_tokenizer
from dmc.models.tensor_parallel import load_shard
from dmc.results.policies import policy_from_config
from dmc.runtime import Engine, SamplingParams

STORAGE = ("block_size", "memory", "kernels", "cuda_graphs", "compile", "kv_cache_dtype")
SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")


@checked_dataclass(frozen=True)
class GenerateConfig:
    """A prompt, its model and method; options of `Engine` and `SamplingParams` are checked there."""

    model: str
    """Folder or hub name."""
    prompt: str
    dtype: str = "auto"
    revision: str | None = None
    policy: dict[str, Any] = field(default_factory=dict)
    """Settings of a policy; empty: the full cache, or the model's own gates."""
    budget: StrictInt | StrictFloat | str | None = None
    max_new_tokens: Any = 64
    temperature: Any = 0.0
    top_k: Any = None
    top_p: Any = 1.0
    seed: Any = 0
    stop: list[str] = field(default_factory=list)
    block_size: Any = 16
    memory: Any = None
    kernels: Any = "auto"
    cuda_graphs: Any = "auto"
    compile: Any = False
    kv_cache_dtype: Any = "auto"


def generate(config: GenerateConfig) -> None:
    """Print the prompt and its continuation; under torchrun the processes share the model."""
    params = SamplingParams(**{name: getattr(config, name) for name in SAMPLING}, stop=tuple(config.stop))
    policy = policy_from_config(config.policy, config.budget)
    model = _load(config)
    tokenizer = load_tokenizer(config.model, config.revision, model.config.vocab_size)
    engine = Engine(model, tokenizer, policy, **{name: getattr(config, name) for name in STORAGE})
    is_first = engine.cache.layout.ranks.rank == 0
    print(config.prompt if is_first else "", end="")
    for event in engine.stream(config.prompt, params):
        print(event.text if is_first else "", end="", flush=True)
    if is_first and event.request.generation:
        stats = event.request.generation.stats
        ratios = f"CR {stats.achieved_ratio:.2f}, {stats.bytes_ratio:.2f} in bytes"
        sizes = f"{stats.bytes_used:,} bytes used, {stats.bytes_allocated:,} allocated"
        print(f"\n\n[{stats.tokens_seen} tokens, {ratios}, {sizes}]", file=sys.stderr)


def _load(config: GenerateConfig) -> Any:
    if torch.distributed.is_torchelastic_launched():
        return load_shard(config.model, None if config.dtype == "auto" else getattr(torch, config.dtype))
    return load_model(config.model, dtype=config.dtype, revision=config.revision)
