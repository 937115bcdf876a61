"""Decoding: tokens a second at CR 1, 4 and 8, kernels against a copy's bandwidth, prompts, sampling."""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from unittest.mock import patch

import decode_kernels
import torch
from parity import choose_tokens, sampler_case
from timings import Case

from dmc import retrofit
from dmc.compression import CompressionConfig
from dmc.models.build import random_model, twin
from gpu_parts.place import CALLS, Figure, Place, Rows, beside_first, row


def figures(place: Place) -> Iterator[Figure]:
    """Tokens a second of 64 sequences at CR 1, 4 and 8 in turns; kernels against a copy; prompts; sampling"""
    yield Figure("throughput", partial(_throughput, place))
    yield Figure("decode kernels", partial(_decode_kernels, place))
    yield Figure("prompts", partial(_prompts, place))
    yield Figure("sampler", partial(_sampler, place))


def _throughput(place: Place) -> Rows:
    """Let engines decode in turns, then look for the largest batch in a memory."""
    from dmc.results.benchmark import BenchmarkConfig, run_benchmark

    config = BenchmarkConfig(
        shape=place.shape(place.size(8, 1)),
        dtype=str(place.dtype).removeprefix("torch."),
        prompt_length=place.size(2048, 32),
        batch_sizes=[place.size(64, 2)],
        ratios=[1.0, 4.0, 8.0],
        hugging_face=False,
        new_tokens=place.size(32, 4),
        memory=place.size(2**29, 2**17),
    )
    stock = random_model(config.shape or {}, place.dtype, place.device)
    models = {
        ratio: twin(stock) if ratio == 1 else retrofit(twin(stock), CompressionConfig(target_ratio=ratio))
        for ratio in config.ratios
    }
    first = None
    for found in run_benchmark(config, models):
        metrics, name = found["metrics"], found["policy"]
        if "largest_batch" in metrics:
            in_bytes = f"in {found['coordinates']['memory'] / 2**20:.0f} MiB of pages"
            yield row(f"largest batch, {name}", metrics["largest_batch"], "sequences", in_bytes)
            continue
        speed = metrics["tokens_per_second"]
        first = first or speed
        beside = f"{speed / first:.2f} x the first's, achieved CR {found['achieved_ratio']:.2f}, "
        beside += f"first token {metrics['first_token_seconds']:.2f} s"
        yield row(
            f"{name}, {found['coordinates']['batch']} sequences of {config.prompt_length}", speed, "tokens/s", beside
        )


def _options(place: Place) -> tuple[Namespace, tuple[int, ...]]:
    """Return the kernels' settings, and batch, KV heads, queries of each, slots, head_dim."""
    dtype = str(place.dtype).removeprefix("torch.")
    options = Namespace(kernels="triton" if place.has_triton else "reference", dtype=dtype, block_size=16, ratio=4.0)
    return options, tuple(place.size(*pair) for pair in ((8, 1), (8, 2), (4, 2), (16384, 64), (128, 16)))


def _decode_kernels(place: Place) -> Rows:
    """Time decode attention against the bandwidth that a copy reaches."""
    bandwidth, _ = place.ceilings()
    options, shape = _options(place)
    batch, heads, _, length, dim = shape
    yield row("copy on the device", bandwidth, "GB/s")
    with torch.device(place.device):
        cases = decode_kernels.decode_cases(shape, options)
    all_bytes = 2 * batch * heads * length * dim * place.dtype.itemsize
    shares = {"ragged": 1 / 4, "one long": 1 / 100 + 1 / (batch * heads)}
    for name, milliseconds in place.milliseconds(cases, CALLS, recorded=True).items():
        reached = all_bytes * shares.get(name.split(", ")[-1], 1) / milliseconds / 1e6
        yield row(f"decode, {name}", milliseconds, "ms", f"{reached:.0f} GB/s, {reached / bandwidth:.0%} of a copy")
    if place.has_triton:
        yield from _sweep(place, cases["triton, ragged"])


def _prompts(place: Place) -> Rows:
    """Time prompts against causal SDPA."""
    options, (_, heads, group, _, dim) = _options(place)
    length = place.size(4096, 32)
    with torch.device(place.device):
        cases = decode_kernels.prefill_cases((1, heads, group, length, dim), options)
    operations = 2 * heads * group * length**2 * dim  # of the causal half of both products
    for name, milliseconds in place.milliseconds(cases, CALLS).items():
        rate = f"{operations / milliseconds / 1e9:.0f} TFLOP/s of causal attention" if "append" not in name else ""
        yield row(f"prefill, {name}", milliseconds, "ms", rate)


def _sampler(place: Place) -> Rows:
    draws = {"greedy": {"temperature": 0}, "top_k 50": {"top_k": 50}, "top_p 0.9": {"top_p": 0.9}}
    samplers = {name: partial(choose_tokens, *sampler_case(place, **options)) for name, options in draws.items()}
    yield from beside_first(place.milliseconds(samplers, CALLS), "sampler, 64 rows")


def _sweep(place: Place, case: Case) -> Rows:
    """Time decode attention with other tunings than this chip's; the fastest belongs into `decode.TUNINGS`."""
    from dmc.kernels.triton import decode

    today = decode.tuning_of(torch.device(place.device))
    others = itertools.product((2, 3, 4), (5, 7), (8192, 16384))
    found: dict[str, float] = {}
    for tuning in dict.fromkeys([today, *(decode.Tuning(*numbers) for numbers in others)]):
        with patch.object(decode, "tuning_of", lambda device, tuning=tuning: tuning):
            found |= place.milliseconds({str(tuning): case}, CALLS, recorded=True)
    yield from beside_first(found, "sweep")
    fastest = min(found, key=lambda name: found[name])
    capability = torch.cuda.get_device_capability() if place.device == "cuda" else None
    yield row("fastest tuning", found[fastest], "ms", f"TUNINGS[{capability}] = {fastest}; today {today}")
