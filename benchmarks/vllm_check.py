"""Exported folders in vLLM: the tokens of `Engine`, then requests held and tokens a second beside stock vLLM."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from gpu_parts.place import Rows, row
from vllm import EngineArgs, LLMEngine
from vllm import SamplingParams as VllmSamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.inputs import TokensPrompt

from dmc import Engine, SamplingParams, retrofit
from dmc.compression import CompressionConfig
from dmc.models.build import random_model, twin
from dmc.results.synthetic_gates import set_synthetic_gates

RATIOS = 1.0, 4.0, 8.0


@contextmanager
def opened(folder: Path, place: Any, **options: Any) -> Iterator[LLMEngine]:
    """Start vLLM on a folder, in this process; end it with what it holds."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if place.device == "cpu":  # the wheel for GPUs lacks what vLLM's CPU platform needs
        sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
        options |= {"worker_cls": "cpu_vllm.Worker", "block_size": 16}
    else:
        options["gpu_memory_utilization"] = 0.3  # must be free; the bytes of the cache are given
    engine = LLMEngine.from_engine_args(
        EngineArgs(str(folder), skip_tokenizer_init=True, disable_log_stats=True, **options)
    )
    try:
        yield engine
    finally:
        engine.engine_core.shutdown()
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()


def submit(engine: LLMEngine, prompts: list[list[int]], num_new: int) -> None:
    """Submit prompts, as requests named by their numbers, each for so many greedy tokens."""
    sampling = VllmSamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), TokensPrompt(prompt_token_ids=prompt), sampling)


def answers(engine: LLMEngine, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    """Return the greedy tokens after each prompt."""
    submit(engine, prompts, num_new)
    found: dict[int, list[int]] = {}
    while engine.has_unfinished_requests():
        found |= {int(done.request_id): list(done.outputs[0].token_ids) for done in engine.step() if done.finished}
    return [found[index] for index in range(len(prompts))]


def held_at_once(engine: LLMEngine, prompts: list[list[int]], num_steps: int) -> tuple[int, float]:
    """Submit more prompts than fit; return how many decode at once, and the median seconds of such a step."""
    submit(engine, prompts, len(prompts[0]))
    scheduler = engine.engine_core.engine_core.scheduler
    most, times = 0, list[float]()
    while len(times) < num_steps and engine.has_unfinished_requests():
        start = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - start
        if all(request.num_output_tokens for request in scheduler.running):  # no prompt is being fed
            most = max(most, len(scheduler.running))
            times.append(seconds)
    engine.abort_request([str(index) for index in range(len(prompts))])
    return most, statistics.median(times)


def check_tokens(place: Any) -> Rows:
    """Compare greedy tokens of gates that decide both ways, in float32."""
    with TemporaryDirectory() as folder:
        yield from _compare_tokens(place, Path(folder))


def check_speed(place: Any) -> Rows:
    """Fill a memory for keys and values with requests, at each ratio and in stock vLLM."""
    with TemporaryDirectory() as folder:
        yield from _fill_memory(place, Path(folder))


def _compare_tokens(place: Any, folder: Path) -> Rows:
    stock = random_model(place.shape(2), torch.float32, place.device)
    config = CompressionConfig(decision_offset=0.0, delay=16)  # every other token
    model = retrofit(twin(stock), config)
    model.save_pretrained(folder)
    generator, num_new = torch.Generator().manual_seed(0), place.size(64, 8)
    lengths = [place.size(length, length // 16) for length in (33, 700, 129, 1500)]
    prompts = [torch.randint(model.config.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    params = SamplingParams(max_new_tokens=num_new, temperature=0.0, ignore_eos=True)
    expected = [generation.token_ids for generation in Engine(model).generate(prompts, params)]
    del model, stock
    options = {"dtype": "float32", "max_model_len": place.size(2048, 128), "max_num_seqs": 4}
    with opened(folder, place, kv_cache_memory_bytes=place.size(2**29, 2**20), **options) as engine:
        found = answers(engine, prompts, num_new)
    equal = sum(one == other for one, other in zip(found, expected, strict=True))
    yield row("answers with the tokens of Engine", equal, f"of {len(prompts)}", holds=equal == len(prompts))


def _fill_memory(place: Any, folder: Path) -> Rows:
    stock = random_model(place.shape(place.size(8, 1)), place.dtype, place.device)
    models = {
        f"vLLM, CR {ratio:g}": (retrofit(twin(stock), CompressionConfig(target_ratio=ratio)), ratio)
        for ratio in RATIOS[:: place.size(1, 2)]
    }
    if place.device == "cuda":  # the wheel has no attention for CPUs
        models = {"stock vLLM": (stock, 0.0), **models}
    length, memory, num_steps = place.size(2048, 128), place.size(2**29, 2**17), place.size(32, 3)
    config = stock.config
    entry = 2 * config.num_key_value_heads * config.head_dim * place.dtype.itemsize * config.num_hidden_layers
    first = None
    for name, (model, ratio) in models.items():
        model.save_pretrained(folder / name)
        count = 2 + int(1.5 * max(ratio, 1.0) * memory / (entry * length))
        prompts = torch.randint(config.vocab_size, (count, length), generator=torch.Generator().manual_seed(0)).tolist()
        options = {
            "dtype": str(place.dtype).removeprefix("torch."), "max_model_len": 2 * length, "max_num_seqs": count,
            "max_num_batched_tokens": max(count, place.size(2048, 64)), "enable_prefix_caching": False,
        }  # fmt: skip
        with opened(folder / name, place, kv_cache_memory_bytes=memory, **options) as engine:
            if ratio:
                set_synthetic_gates(engine.model_executor.driver_worker.get_model().view, ratio)
            held, seconds = held_at_once(engine, prompts, num_steps)
        speed = held / seconds
        first = first or (held, speed)
        beside = f"{held / first[0]:.2f} x the first's requests, {speed / first[1]:.2f} x its tokens/s"
        yield row(f"{name}, requests of {length} tokens held", held, "requests", f"in {memory / 2**20:g} MiB")
        yield row(f"{name}, tokens a second of all of them", speed, "tokens/s", beside)
