"""Models whose layers are of several kinds: some see, and keep, the last tokens alone."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from runtime.test_stock_attention import build, difference

from dmc import Engine, SamplingParams

FULL, SLIDING = "full_attention", "sliding_attention"
LAYERS = {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, FULL], "max_position_embeddings": 512}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": {**LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3_text": {**LAYERS, "query_pre_attn_scalar": 16},
    "olmo3": LAYERS,
    "cohere2": LAYERS,
    "exaone4": LAYERS,
    "ministral": LAYERS,
    "mistral": {"num_hidden_layers": 2, "max_position_embeddings": 512},
}
GREEDY = SamplingParams(max_new_tokens=20, temperature=0.0)


def hybrid(family: str, window: int = 24, **changes: Any) -> Any:
    return build(family, **{"sliding_window": window, **FAMILIES[family], **changes})


def own_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """What the model's own `generate` continues a prompt with."""
    found = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return found[0, len(prompt) :].tolist()


def texts(*lengths: int, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(83, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize(("family", "window"), zip(FAMILIES, itertools.cycle([8, 24]), strict=False))
def test_a_pass_equals_the_models_own(family: str, window: int) -> None:
    assert difference(hybrid(family, window), Engine(hybrid(family, window), prefill_chunk_size=16)) < 1e-4


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("gpt_oss", "reference"),
        ("gemma3_text", "cpu"),
        ("mistral", "cpu"),
        *(pytest.param(family, "cpu", marks=pytest.mark.slow) for family in ("gpt_oss", "olmo3", "cohere2", "exaone4")),
    ],
)
def test_a_crowded_engine_continues_as_the_model_itself(family: str, kernels: str) -> None:
    """In a pool too small for all, with chunks, preemption, prefixes, and continuations of one prompt."""
    model, generator = hybrid(family), random.Random(family)
    prompts = texts(250, 40, 7, 60)
    prompts += [prompts[0][:100] + prompts[3][:30], prompts[0][:96]]
    greedy, several = (SamplingParams(max_new_tokens=20, temperature=0.0, n=n) for n in (1, 2))
    expected = [own_tokens(model, prompt, 20) for prompt in prompts]
    layout = Engine(model).cache.layout
    memory = int(1.05 * layout.most_blocks(270, 16)) * layout.block_bytes(16)
    engine = Engine(model, memory=memory, prefill_chunk_size=50, max_batch_size=6, prefix_cache=True, kernels=kernels)
    order = [0, *(index for index in range(1, len(prompts)) for _ in range(2))]
    generator.shuffle(order)
    requests = [(index, engine.submit(prompts[index], several if index % 2 else greedy)) for index in order]
    engine.run([request for _, request in requests])
    for index, request in requests:
        for generation in (request.generation, *request.generation.alternatives):
            assert generation.token_ids == expected[index]
    preempted = sum(request.generation.stats.num_preemptions for _, request in requests)
    assert preempted > 0 or not engine.cache.layout.num_layers  # rings that are full take no more blocks
    assert engine.blocks_in_use == 0
    engine.clear_prefix_cache()
    assert engine.cache.allocator.num_in_use == 0 and not engine.cache.allocator.extra.any()


def test_a_session_goes_on_in_its_window() -> None:
    model = hybrid("gemma3_text", 16)
    engine, (context, first, second) = Engine(model), texts(120, 5, 40)
    with engine.session() as session:
        session.feed(context)
        fork = session.fork()
        assert session.generate(first, GREEDY).token_ids == own_tokens(model, context + first, 20)
        assert fork.generate(second, GREEDY).token_ids == own_tokens(model, context + second, 20)
        fork.close()
    assert engine.blocks_in_use == 0


@pytest.mark.parametrize("window", [16, 24])
def test_a_layer_keeps_no_more_than_its_window(window: int) -> None:
    model, bytes_by_length = hybrid("olmo3", window), []
    for length in (8, 100, 300):
        engine = Engine(model, prefill_chunk_size=64)
        (generation,) = engine.generate(texts(length), SamplingParams(max_new_tokens=1, temperature=0.0))
        stats, heads = generation.stats, 2
        assert stats.slots.tolist() == [[length] * heads] * 2 and stats.achieved_ratio == 1
        rings, block = 2 * heads * -(-min(length, window) // 16), engine.cache.block_bytes
        full = 2 * heads * -(-length // 16)
        assert stats.bytes_allocated == (full + rings) * block + engine.cache.state_bytes
        bytes_by_length.append((stats.bytes_allocated - engine.cache.state_bytes) - full * block)
        assert stats.mean_bytes_allocated <= stats.bytes_allocated == stats.peak_bytes_allocated
        entries = engine.cache.layout.entry_bytes * heads * 2 * (length + min(length, window))
        assert stats.bytes_ratio == entries / stats.bytes_used
    assert bytes_by_length[0] <= bytes_by_length[1] == bytes_by_length[2]


def test_8_bit_windows_are_read_as_they_were_written() -> None:
    model, (prompt,) = hybrid("gemma3_text"), texts(90)
    whole, one_by_one = (Engine(model, kv_cache_dtype="int8", prefill_chunk_size=size) for size in (None, 1))
    found = [engine.score([prompt[:1]], [prompt[1:]])[0] for engine in (whole, one_by_one)]
    apart = (
        found[0] - found[1]
    ).abs()  # of the full cache: median 0.06; a value on the edge of two steps may take either
    assert apart.median() < 1e-3 and apart.max() < 0.1


def test_the_memory_of_windows_is_counted_when_requests_are_admitted() -> None:
    model = hybrid("mistral", 16)
    engine = Engine(model, memory=2 * 2 * 4096)
    block = engine.cache.block_bytes
    engine = Engine(model, memory=2 * 2 * block)  # one window of each layer and head
    (generation,) = engine.generate(texts(300), GREEDY)
    assert generation.token_ids == own_tokens(model, texts(300)[0], 20) and generation.stats.achieved_ratio == 1
    with pytest.raises(ValueError, match="may need 4 blocks"):
        Engine(model, memory=2 * 2 * block - 1).submit(texts(300)[0], GREEDY)


def test_what_is_copied_of_a_row_holds_its_tables_once() -> None:
    """Those of windows are a part of `block_tables` there; twice, they took memory and counted twice."""
    assert "ring_tables" not in Engine(hybrid("gemma3_text")).cache.read_row(0)
