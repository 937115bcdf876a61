"""Benchmark of speed and memory: decoders take turns, so that a noisy machine slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, StrictBool, StrictInt
from torch import Tensor
from tqdm import tqdm
from transformers import StaticCache

from dmc.config.settings import Count, NonNegative, OutputFolder, Ratio, checked_dataclass
from dmc.files import json_digest
from dmc.gguf import ModelName
from dmc.results.compare import device_name
from dmc.results.measurement import Row, new_row
from dmc.results.synthetic_gates import set_synthetic_gates
from dmc.runtime import Engine, SamplingParams

CHUNK = 2048
"""Number of prompt tokens that the engine feeds at once."""


@checked_dataclass(frozen=True)
class BenchmarkConfig:
    """Settings of a benchmark."""

    model: ModelName | None = None
    """Folder, hub name or GGUF file of a stock model; None: random weights."""
    shape: dict[str, Any] | None = None
    """Shape of random weights: fields of a transformers configuration, with `model_type`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    prompt_length: Count = 1024
    """Tokens of every prompt, drawn at random."""
    new_tokens: Count = 16
    """Total number of tokens that every sequence decodes, after the first."""
    batch_sizes: Annotated[list[Count], Field(min_length=1)] = field(default_factory=lambda: [1, 8])
    ratios: Annotated[list[Ratio], Field(min_length=1)] = field(default_factory=lambda: [1.0, 4.0])
    """CRs of the engine's decoders; 1 is the full cache, others use synthetic decisions."""
    delay: NonNegative = 0
    """The gates' delay."""
    hugging_face: StrictBool = True
    """Whether to measure `generate()` with a preallocated static cache too."""
    memory: StrictInt | None = None
    """Bytes of cache pages for which to find the largest batch; None: do not search."""
    block_size: Count = 16
    kernels: str = "auto"
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    """Of the engine's keys and values, see `Engine`."""
    rounds: Count = 4
    """Number of turns of every decoder; medians are reported."""
    seed: StrictInt = 0
    output: OutputFolder = "outputs/benchmark"

    def __post_init__(self) -> None:
        if self.model is None and self.shape is None:
            raise ValueError("give model=DIR (a folder or hub name) or shape (random weights)")
        if self.new_tokens < self.rounds:
            raise ValueError(f"new_tokens={self.new_tokens} cannot be divided among rounds={self.rounds}: give more")


class EngineDecoder:
    """The engine, with the full cache (ratio 1, the stock model), or gates or a policy at a ratio."""

    def __init__(
        self,
        model: Any,
        ratio: float,
        prompts: Tensor,
        config: BenchmarkConfig,
        policy: Any = None,
        name: str | None = None,
    ) -> None:
        self.name, self.config, self.device = name or f"engine CR {ratio:g}", config, device_name(model)
        self.ratio, self._prompts = ratio, prompts.tolist()
        as_served = {"compile": "auto", "cuda_graphs": "auto"}
        self._engine = make_engine(model, len(prompts), config, prefill_chunk_size=CHUNK, policy=policy, **as_served)
        beside = len(prompts) * -(-config.prompt_length // CHUNK)  # tokens decoded while others are fed
        self._max_new_tokens = 3 + config.new_tokens + beside
        self._requests: list[Any] = []

    def warm_up(self) -> None:
        """Compile and record what a GPU runs."""
        self._engine.generate(self._prompts, SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True))

    def prefill(self) -> None:
        """Feed the prompts and produce the first token of each."""
        self._requests = _submit(self._engine, self._prompts, self._max_new_tokens)
        while not all(request.logprobs for request in self._requests):
            self._engine.step()

    def decode(self, steps: int) -> list[float]:
        """Produce more tokens of each sequence; return the mean seconds of a step, whose ends nobody waits for."""

        def run() -> None:
            for _ in range(steps):
                self._engine.step()

        return [seconds(run) / steps]

    def memory(self) -> tuple[int, float]:
        """Return the present bytes of the cache, and its achieved ratio."""
        stats = [self._engine.stats(request) for request in self._requests]
        seen = sum(stat.tokens_seen * stat.slots.numel() for stat in stats)
        entries = sum(int(stat.slots.sum()) for stat in stats)
        return sum(stat.bytes_allocated for stat in stats), seen / entries


class HuggingFaceDecoder:
    """`generate()` of transformers, with a static cache that is allocated before the clock starts."""

    name, ratio = "hugging face, static cache", 1.0

    def __init__(self, model: Any, prompts: Tensor, config: BenchmarkConfig) -> None:
        self._model, self._tokens, self.config, self.device = model, prompts, config, device_name(model)
        self._cache = StaticCache(config=model.config, max_cache_len=prompts.shape[1] + config.new_tokens + 2)

    @torch.no_grad()
    def prefill(self) -> None:
        """Feed the prompts through a dynamic cache, then copy: a static one would need T x T masks."""
        output = self._model(self._tokens, use_cache=True, logits_to_keep=1)
        first = output.logits[:, -1].argmax(-1, keepdim=True)
        length = self._tokens.shape[1]
        for index, layer in enumerate(output.past_key_values.layers):
            self._cache.update(layer.keys[:, :, :length], layer.values[:, :, :length], index)
            layer.keys = layer.values = None
        self._tokens = torch.cat((self._tokens, first), dim=-1)

    def decode(self, steps: int) -> list[float]:
        """See `EngineDecoder`; of several steps without the first, which prepares the call."""
        marks = [time.perf_counter()]

        def mark(input_ids: Tensor, scores: Tensor) -> Tensor:
            marks.append(time.perf_counter())
            return scores

        self._tokens = self._model.generate(
            self._tokens,
            attention_mask=torch.ones_like(self._tokens),
            past_key_values=self._cache,
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
            logits_processor=[mark],
            pad_token_id=0,
        )
        begin = min(1, steps - 1)
        return [(marks[-1] - marks[begin]) / (steps - begin)]

    def memory(self) -> tuple[int, float]:
        """See `EngineDecoder`."""
        tensors = [tensor for layer in self._cache.layers for tensor in (layer.keys, layer.values)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors), 1.0


def seconds(action: Callable[[], Any]) -> float:
    """Time one call, work on the GPU included."""
    start = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def run_benchmark(config: BenchmarkConfig, models: dict[float, Any], plain: Any | None = None) -> Iterator[Row]:
    """Measure every decoder at every batch size, and the largest batches if a memory budget is given.

    Args:
        config: settings of the benchmark.
        models: model of the engine by ratio: a stock one for 1, a compressed one above, whose gates are made to decide
            at random.
        plain: a stock model for `generate()`, or None.
    Yields:
        Rows for a `Store`, as soon as they are measured.
    Raises:
        ValueError: the memory holds no sequence at one of the ratios; nothing has been measured.
    """
    for ratio, model in models.items():
        if ratio > 1:
            set_synthetic_gates(model, ratio, config.seed)
    for ratio in config.ratios if config.memory is not None else ():
        _check_memory(models[ratio], config)
    for batch_size in config.batch_sizes:
        prompts = random_prompts(models[config.ratios[0]], batch_size, config)
        decoders: list[Any] = [EngineDecoder(models[ratio], ratio, prompts, config) for ratio in config.ratios]
        if plain is not None:
            decoders.append(HuggingFaceDecoder(plain, prompts, config))
        yield from time_interleaved(decoders, batch_size)
    for ratio in config.ratios if config.memory is not None else ():
        metrics = {"largest_batch": largest_batch(models[ratio], ratio, config)}
        measured = {"metrics": metrics, "coordinates": {"memory": config.memory}}
        name, device = f"engine CR {ratio:g}", device_name(models[ratio])
        yield _row(config, name, device, measured, requested_ratio=ratio, achieved_ratio=None)


def _row(
    config: BenchmarkConfig, name: str, device: str, measured: dict[str, Any], turns: str | None = None, **memory: Any
) -> Row:
    names = ("prompt_length", "new_tokens", "rounds", "delay", "block_size", "kernels", "kv_cache_dtype", "seed")
    settings = {"model": _described(config), "policy": {"ratio": memory["requested_ratio"]}, "turns": turns}
    settings["task"] = {name: getattr(config, name) for name in names} | {"device": device}
    model = "random weights" if config.model is None else "/".join(Path(config.model).parts[-2:])
    return new_row(model, name, "speed", settings, device=device, **measured, **memory)


def _described(config: BenchmarkConfig) -> dict[str, Any]:
    return {"path": config.model, "shape": None if config.model else config.shape, "dtype": config.dtype}


def random_prompts(model: Any, batch_size: int, config: BenchmarkConfig) -> Tensor:
    """Draw token ids, [batch_size, prompt_length]."""
    generator = torch.Generator().manual_seed(config.seed)
    shape = (batch_size, config.prompt_length)
    return torch.randint(model.config.vocab_size, shape, generator=generator).to(model.device)


def make_engine(model: Any, batch_size: int, config: BenchmarkConfig, **options: Any) -> Engine:
    """Build an engine from the configuration."""
    options |= {"block_size": config.block_size, "kernels": config.kernels, "kv_cache_dtype": config.kv_cache_dtype}
    return Engine(model, max_batch_size=batch_size, **options)


def time_interleaved(decoders: list[Any], batch_size: int) -> Iterator[Row]:
    """Prefill every decoder, then let them decode in turns; yield a row for each.

    Args:
        decoders: of one or several models, with the same lengths and rounds in `config`.
        batch_size: number of their prompts.
    Yields:
        Rows for a `Store`. Those of one call have the same `turns` in their settings, a digest of who took part.
    """
    config = decoders[0].config
    who = [[decoder.name, _described(decoder.config)] for decoder in decoders]
    turns = json_digest(who)[:8]
    for decoder in decoders:
        if torch.cuda.is_available() and isinstance(decoder, EngineDecoder):
            decoder.warm_up()
    first = [seconds(decoder.prefill) for decoder in tqdm(decoders, desc=f"prefill, batch {batch_size}")]
    steps: list[list[float]] = [[] for _ in decoders]
    for decoder in decoders:
        decoder.decode(1)  # warm-up
    for _ in tqdm(range(config.rounds), desc=f"decode, batch {batch_size}"):
        for decoder, step_times in zip(decoders, steps, strict=True):
            step_times += decoder.decode(config.new_tokens // config.rounds)
    place = {"batch": batch_size, "length": config.prompt_length}
    for decoder, first_seconds, step_times in zip(decoders, first, steps, strict=True):
        step, (allocated, achieved) = statistics.median(step_times), decoder.memory()
        metrics = {"tokens_per_second": batch_size / step, "token_seconds": step, "first_token_seconds": first_seconds}
        memory = {"requested_ratio": decoder.ratio, "achieved_ratio": achieved, "peak_bytes_allocated": allocated}
        measured = {"metrics": metrics, "coordinates": place, "samples": len(step_times)}
        yield _row(decoder.config, decoder.name, decoder.device, measured, turns, **memory)


def _check_memory(model: Any, config: BenchmarkConfig) -> None:
    """Raise ValueError if `config.memory` bytes cannot hold one sequence to its end."""
    assert config.memory is not None
    cache, num_tokens = make_engine(model, 1, config).cache, config.prompt_length + config.new_tokens
    needed = cache.blocks_for(num_tokens) * cache.block_bytes
    if config.memory < needed:
        sequence = f"sequence of {num_tokens} tokens at CR {cache.expected_ratio:g}"
        raise ValueError(f"memory={config.memory} holds no {sequence}: give at least {needed} bytes")


def largest_batch(model: Any, ratio: float, config: BenchmarkConfig) -> int:
    """Submit more prompts than fit into `config.memory` bytes and count how many decode at the same time."""
    assert config.memory is not None
    layout = make_engine(model, 1, config).cache.layout
    blocks = layout.most_blocks(config.prompt_length, config.block_size)
    most = 2 + int(1.5 * ratio * config.memory / (blocks * layout.block_bytes(config.block_size)))
    chunk = 8 * config.block_size  # a chunk reserves uncompressed room for its tokens
    engine = make_engine(model, most, config, memory=config.memory, prefill_chunk_size=chunk)
    prompts = random_prompts(model, most, config).tolist()
    decoded = max(config.prompt_length, 1 + config.new_tokens)  # the first ones decode while others are fed
    if engine.cache.blocks_for(config.prompt_length + decoded) > engine.cache.allocator.num_blocks:
        decoded = 1 + config.new_tokens  # there is room for one sequence
    requests = _submit(engine, prompts, decoded)
    largest = steady = 0
    with tqdm(total=config.new_tokens, desc=f"largest batch, CR {ratio:g}") as bar:
        while steady < config.new_tokens and not any(request.generation for request in requests):
            engine.step()
            held = [request for request in requests if request.sequence.row is not None]
            if all(request.logprobs for request in held):  # no prompt is being fed: all of them decode
                largest, steady = max(largest, len(held)), steady + 1
                bar.update()
    for request in requests:
        engine.abort(request)
    return largest


def _submit(engine: Engine, prompts: list[list[int]], max_new_tokens: int) -> list[Any]:
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)
    return [engine.submit(prompt, params) for prompt in prompts]
