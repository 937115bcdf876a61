"""Read a text into the compressed cache, carry it, continue a prompt: with learned gates or a training-free policy.

Read a text once: context=notes.txt save=outputs/caches/notes, and from then on context=outputs/caches/notes.
A model too large for one device: torchrun --nproc-per-node 2 scripts/generate.py model=DIR prompt='import os'.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import Any

import torch
from pydantic import StrictBool, StrictFloat, StrictInt

from dmc.config import build_config
from dmc.config.settings import OutputFolder, checked_dataclass
from dmc.gguf import ModelName
from dmc.models import load_model
from dmc.models.loading import load_tokenizer
from dmc.models.tensor_parallel import load_shard
from dmc.ranks import ALONE, Ranks
from dmc.results.policies import policy_from_config
from dmc.runtime import Engine, GenerationStats, SamplingParams, Session
from dmc.runtime.carried_cache import check_can_save
from dmc.runtime.options import EngineOptions

STORAGE = ("block_size", "memory", "kernels", "cuda_graphs", "compile", "kv_cache_dtype")
SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")


@checked_dataclass(frozen=True)
class GenerateConfig:
    """A context, a prompt, their model and method; options of `Engine` and `SamplingParams` are checked there.

    Raises:
        ValueError: there is nothing to read, nothing to save, or no turn for the chat template.
    """

    model: ModelName
    """Folder, hub name or GGUF file."""
    prompt: str | None = None
    """Text to continue, after the context if there is one; None: only the context is read."""
    chat: StrictBool = False
    """Whether the prompt is a user's turn, which the model's chat template turns into the beginning of an answer."""
    context: str | None = None
    """Text file that is read, and compressed, before the prompt, or folder of a carried cache; None: there is none."""
    save: OutputFolder | None = None
    """Folder for the cache of the context; None: it is not kept."""
    overwrite: StrictBool = False
    """Whether a cache that was saved there is replaced."""
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

    def __post_init__(self) -> None:
        if self.prompt is None and self.context is None:
            raise ValueError("give a prompt to continue, or a context to read: prompt='import os', context=FILE")
        if self.save is not None and self.context is None:
            raise ValueError(f"save={self.save} keeps the cache of a context: give context=FILE")
        if self.chat and self.prompt is None:
            raise ValueError("chat=true makes the prompt a user's turn: give prompt=")
        if self.context is not None and not Path(self.context).exists():
            raise FileNotFoundError(f"context={self.context}: expected a text file, or the folder of a carried cache")


def generate(config: GenerateConfig) -> None:
    """Print the prompt and its continuation, and save the context's cache; under torchrun processes share the model."""
    policy = policy_from_config(config.policy, config.budget)
    if config.save is not None:
        ranks = Ranks.init_process_group() if torch.distributed.is_torchelastic_launched() else ALONE
        check_can_save(Path(config.save), config.overwrite, ranks, policy)
    text = None if config.context is None or Path(config.context).is_dir() else _read_text(config.context)
    params = SamplingParams(**{name: getattr(config, name) for name in SAMPLING}, stop=tuple(config.stop))
    EngineOptions(**{name: getattr(config, name) for name in STORAGE})  # before the weights are loaded
    if config.chat and not getattr(load_tokenizer(config.model, config.revision), "chat_template", None):
        raise ValueError("chat=true: the model has no chat template; leave it out, and the prompt is continued")
    model = _load(config)
    tokenizer = load_tokenizer(config.model, config.revision, model.config.vocab_size)
    engine = Engine(model, tokenizer, policy, **{name: getattr(config, name) for name in STORAGE})
    is_first = engine.cache.layout.ranks.rank == 0
    with _after_context(engine, config.context, text, is_first) as session:
        if config.save is not None and session is not None:
            engine.save(session, config.save, config.overwrite)
        if config.prompt is None:
            return
        print(config.prompt if is_first else "", end="\n" if is_first and config.chat else "")
        prompt = _as_turn(config.prompt, tokenizer, session is not None) if config.chat else config.prompt
        for event in engine.stream(prompt, params, session):
            print(event.text if is_first else "", end="", flush=True)
        if is_first and event.request.generation:
            print("\n", file=sys.stderr)
            _report(event.request.generation.stats)


@contextmanager
def _after_context(engine: Engine, folder: str | None, text: str | None, is_first: bool) -> Iterator[Session | None]:
    """Yield a session that has read a text, or goes on from a carried cache; None without either."""
    if text is not None:
        with engine.session() as session:
            stats = session.feed(text)
            if is_first:
                _report(stats)
            yield session
    elif folder is not None:
        with engine.load(folder) as session:
            yield session
    else:
        yield None


def _as_turn(prompt: str, tokenizer: Any, is_continued: bool) -> list[int]:
    """Return the tokens of a user's turn and of the beginning of an answer; a text that is continued has begun."""
    turn = [{"role": "user", "content": prompt}]
    tokens = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
    return list(tokens[1:] if is_continued and tokens[:1] == [tokenizer.bos_token_id] else tokens)


def _read_text(context: str) -> str:
    try:
        return Path(context).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"context={context} is no text in UTF-8 ({error.reason} at byte {error.start})") from None


def _report(stats: GenerationStats) -> None:
    ratios = f"CR {stats.achieved_ratio:.2f}, {stats.bytes_ratio:.2f} in bytes"
    sizes = f"{stats.bytes_used:,} bytes used, {stats.bytes_allocated:,} allocated"
    print(f"[{stats.tokens_seen} tokens, {ratios}, {sizes}]", file=sys.stderr)


def _load(config: GenerateConfig) -> Any:
    if torch.distributed.is_torchelastic_launched():
        return load_shard(config.model, config.dtype, revision=config.revision)
    return load_model(config.model, dtype=config.dtype, revision=config.revision)


def main(settings: Any) -> None:
    """Generate."""
    generate(build_config(GenerateConfig, settings))
