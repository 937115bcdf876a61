"""Every way of serving against the reference: prompts in chunks beside decoding, then given tokens one by one."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from gpu_parts.place import Rows, failure, row
from torch import Tensor

from dmc import Engine, SamplingParams, policies, retrofit
from dmc.budget import Budget
from dmc.compression import CompressionConfig
from dmc.kernels import BACKENDS
from dmc.models.build import random_model, twin
from dmc.runtime.sampling import Choice, Sampling, distributions

GATES: dict[str, dict[str, Any]] = {
    "merge": {},
    "merge, delay 16": {"delay": 16},
    "drop, delay 16": {"action": "drop", "delay": 16},
}
LARGEST_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Of results that should be equal: log-probabilities, attention, gradients."""
IN_8_BITS = 1e-2
"""Where pages have 8 bits: a number between two of them is rounded to either."""
SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "CUDA graphs": ("merge", {}, {"cuda_graphs": True}),
    "CUDA graphs, compiled": ("merge, delay 16", {}, {"cuda_graphs": True, "compile": True}),
    "exact merge": ("exact merge", {}, {}),
    "8-bit pages": ("merge, delay 16", {"kv_cache_dtype": "int8"}, {}),
    "8-bit pages, H2O": ("full cache", {"kv_cache_dtype": "int8", "policy": policies.H2O(budget=Budget(ratio=2))}, {}),
    "prefix cache": ("full cache", {"prefix_cache": True}, {}),
    "H2O": ("full cache", {"policy": policies.H2O(budget=Budget(ratio=2))}, {}),
    "OmniKV, prompts in the host's memory": (
        "three layers",
        {},
        {"policy": policies.OmniKV(budget=Budget(ratio=1), filter_layers=(0,), offload=True)},  # chooses all: exact
    ),
    "TOVA": ("full cache", {"policy": policies.TOVA(budget=Budget(ratio=2))}, {}),
    "windows and sinks": ("windows and sinks", {}, {}),
    "windows and sinks, H2O": ("windows and sinks", {"policy": policies.H2O(budget=Budget(ratio=2))}, {}),
}
"""Beside backends and gates: the model, options of both engines, and of the one that is checked."""


class Teacher:
    """Gives a sequence its next token, whatever the model prefers, and keeps the predictions."""

    def __init__(self, prompt: list[int], tokens: list[int]) -> None:
        self.begin, self.tokens = len(prompt), tokens
        self.kept: list[Tensor] = []

    def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
        self.kept.append(scores.float().log_softmax(-1).cpu())
        given = self.tokens[tokens.shape[-1] - self.begin]
        return torch.full_like(scores, -torch.inf).index_fill_(-1, torch.tensor([given], device=scores.device), 0.0)


def decoded(engine: Engine, prompts: list[list[int]], continuations: list[list[int]]) -> Tensor:
    """Feed prompts and then the continuations, token by token; the log-probabilities of all steps, [n, vocab]."""
    teachers = [Teacher(*pair) for pair in zip(prompts, continuations, strict=True)]
    params = [
        SamplingParams(max_new_tokens=len(teacher.tokens), temperature=0, ignore_eos=True, logits_processor=teacher)
        for teacher in teachers
    ]
    for generation, teacher in zip(engine.generate(prompts, params), teachers, strict=True):
        assert generation.token_ids == teacher.tokens, generation.finish_reason
    return torch.cat([torch.cat(teacher.kept) for teacher in teachers])


class CountedKernel:
    """Counts the launches of a Triton kernel."""

    def __init__(self, kernel: Any, name: str, counts: Counter[str]) -> None:
        self._kernel, self._name, self._counts = kernel, name, counts

    def __getitem__(self, grid: Any) -> Any:
        self._counts[self._name] += 1
        return self._kernel[grid]


@contextlib.contextmanager
def counted_kernels() -> Iterator[Counter[str]]:
    """Count the launches of all Triton kernels by name, those that are not launched with 0."""
    from dmc.kernels.triton import append, append_chunk, compaction, decode, evict_one, prefill, received

    counts: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        for module in (append, append_chunk, decode, prefill, received, evict_one, compaction):
            for name, kernel in [item for item in vars(module).items() if item[0].endswith("_kernel")]:
                counts[name] += 0
                stack.enter_context(patch.object(module, name, CountedKernel(kernel, name, counts)))
        yield counts


def check_serving(place: Any, dtype: torch.dtype) -> Rows:
    """Backends, gates and settings of an engine against the reference, then which kernels ran."""
    with counted_kernels() if place.has_triton else contextlib.nullcontext(Counter[str]()) as counts:
        yield from _of_dtype(place, dtype)
    if place.has_triton:
        missing = [name for name, count in counts.items() if not count]
        ran = f"never ran: {', '.join(missing)}" if missing else "each one's launches: " + _listed(counts)
        title = f"Triton kernels that ran, {_named(dtype)}"
        yield row(title, len(counts) - len(missing), f"of {len(counts)}", ran, holds=not missing)


def sampler_case(place: Any, **options: Any) -> tuple[Tensor, list[SamplingParams], list[float]]:
    """Make logits of 64 sequences, their parameters and uniform numbers."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(64, place.size(128_256, 997), generator=generator)
    params = [SamplingParams(**options)] * len(logits)
    return logits.to(place.device), params, torch.rand(len(logits), generator=generator).tolist()


def choose_tokens(logits: Tensor, params: list[SamplingParams], uniforms: list[float]) -> Choice:
    """Choose as a step does whose distributions are not flat."""
    return distributions(logits, params)[0].choose(Sampling.of(params, uniforms, logits.shape[-1]))


def check_sampler(place: Any) -> Rows:
    """Draw with top_p, and by its definition in float64."""
    logits, params, uniforms = sampler_case(place, temperature=0.7, top_p=0.9)
    chosen = choose_tokens(logits, params, uniforms).tokens.tolist()
    equal = 0
    for token, row_of_logits, uniform in zip(chosen, logits.double().cpu(), uniforms, strict=True):
        share = (row_of_logits / 0.7).softmax(-1)
        most_likely, order = share.sort(descending=True)
        share[order[most_likely.cumsum(-1) - most_likely >= 0.9]] = 0.0
        cumulative = share.cumsum(-1)
        equal += token == int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
    holds = equal >= len(chosen) - 1  # a token at the edge of the mass may be in or out
    yield row("top_p, tokens of its definition", equal, f"of {len(chosen)}", holds=holds)


def check_graphs(place: Any) -> Rows:
    """Recorded steps of two engines in turns, one of them dropped and made again, and the tokens of eager ones.

    Batches fill their bucket, so that products have the shapes of eager steps.
    """
    model = retrofit(random_model(place.shape(2), place.dtype, place.device), CompressionConfig())
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(model.config.vocab_size, (4, place.size(200, 9)), generator=generator).tolist()
    length = place.size(60, 5)
    wishes: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 1},
        {"seed": 2, "top_k": 40},
        {"seed": 3, "top_p": 0.9},
    ]
    params = [SamplingParams(max_new_tokens=length, ignore_eos=True, **wish) for wish in wishes]

    def engine(graphs: Any) -> Engine:
        return Engine(model, memory=place.size(2**29, 2**22), max_batch_size=4, cuda_graphs=graphs)

    expected = [generation.token_ids for generation in engine(False).generate(prompts, params)]
    first, second = engine("auto"), engine("auto")
    equal = recorded = 0
    for turn in range(3):
        if turn == 2:
            first = engine("auto")
        requests = [(one, one.submit(*asked)) for asked in zip(prompts, params, strict=True) for one in (first, second)]
        while any(request.generation is None for _, request in requests):
            first.step()
            second.step()
        for index, (one, request) in enumerate(requests):
            assert request.generation is not None
            equal += request.generation.token_ids == expected[index // 2]
            recorded += one._runner.num_recorded_steps > 0
    holds = equal == 24 and (place.device == "cpu" or recorded == 24)
    yield row("CUDA graphs, two engines, tokens of eager steps", equal, "of 24", f"recorded {recorded}", holds=holds)


def check_waits(place: Any) -> Rows:
    """What the host waits for in one layer while a prompt is fed and its cache compressed, as CUDA counts it."""
    chosen = (None, policies.H2O, policies.SnapKV, policies.D2O, policies.CaM, policies.KVzip, policies.LAVa)
    shallow, deep = (random_model(place.shape(layers), place.dtype, place.device) for layers in (2, 4))
    prompt = torch.randint(shallow.config.vocab_size, (place.size(700, 22),)).tolist()
    for policy in chosen:
        counts = []
        for model in (shallow, deep):
            engine = Engine(model, policy=policy and policy(budget=Budget(ratio=2)), memory=place.size(2**29, 2**22))
            for _ in range(2):  # the first pass compiles
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    torch.cuda.set_sync_debug_mode("warn")
                    engine.generate([prompt], SamplingParams(max_new_tokens=1))
                    torch.cuda.set_sync_debug_mode("default")
            counts.append(sum("synchronizing CUDA operation" in str(warning.message) for warning in caught))
        of_layer, name = (counts[1] - counts[0]) / 2, "full cache" if policy is None else policy.__name__
        most = policy is policies.LAVa  # counts budgets before the next layer runs
        yield row(f"waits of a layer, prompt, {name}", of_layer, f"of {most:d}", holds=of_layer <= most)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name.strip('_').removesuffix('_kernel')} {count}" for name, count in sorted(counts.items()))


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _of_dtype(place: Any, dtype: torch.dtype) -> Rows:
    stock = random_model(place.shape(1), dtype, place.device)  # in a second layer the last bit may turn a decision
    for name, parameter in stock.named_parameters():  # as peaked as attention of a 7B's width
        if "self_attn" in name:
            parameter.data *= place.size(1, 8)
    generator = torch.Generator().manual_seed(0)

    def random_tokens(*lengths: int) -> list[list[int]]:
        return [torch.randint(stock.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]

    prompts = random_tokens(place.size(700, 22), place.size(300, 9))
    continuations = random_tokens(place.size(40, 6), place.size(50, 7))
    models = {"full cache": twin(stock), "three layers": random_model(place.shape(3), dtype, place.device)}
    of_kinds = {"model_type": "gpt_oss", "layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 1}
    of_kinds |= {"sliding_window": place.size(128, 8), "num_experts_per_tok": 1}  # one expert: nothing is routed
    models["windows and sinks"] = random_model({**place.shape(2), **of_kinds}, dtype, place.device)
    for gates, changes in {**GATES, "exact merge": {"window_size": None}}.items():
        config = CompressionConfig(decision_offset=0.0, **changes)  # every other token, for keys spread evenly about 0
        models[gates] = retrofit(twin(stock), config)
    ways = [
        (f"{kernels}, {gates}", gates, kernels, {}, {}) for gates in ("full cache", *GATES) for kernels in BACKENDS[1:]
    ]
    kernels = "triton" if place.has_triton else "cpu"
    ways += [(f"{kernels}, {name}", gates, kernels, *options) for name, (gates, *options) in SETTINGS.items()]
    expected: dict[str, Tensor] = {}
    for name, gates, kernels, both, engine_options in ways:
        options = {"prefill_chunk_size": place.size(256, 16), "block_size": 256 if kernels == "flash" else 16, **both}
        title = f"{name}, {_named(dtype)}"
        try:
            engine = Engine(models[gates], kernels=kernels, **{**options, **engine_options})
        except (ValueError, ImportError) as error:
            yield row(title, None, "", f"does not serve this: {error}"[:300])
            continue
        key = f"{gates}, {both}"
        try:
            if key not in expected:
                reference = Engine(models[gates], kernels="reference", **{**options, "block_size": 16})
                expected[key] = decoded(reference, prompts, continuations)
            worst = float((decoded(engine, prompts, continuations) - expected[key]).abs().max())
        except Exception as error:  # the other ways are compared all the same
            traceback.print_exc()
            yield failure(title, error)
            continue
        holds = worst <= max(LARGEST_DIFFERENCE[dtype], IN_8_BITS if "kv_cache_dtype" in both else 0)
        yield row(title, worst, "nats", "of the reference, at most", holds=holds)
