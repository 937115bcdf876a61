"""The laws that every compression method obeys in the engine."""

import copy
from typing import Any

import pytest
import torch

from dmc import Engine, SamplingParams, retrofit
from dmc.compression import CompressionConfig

METHODS: dict[str, dict[str, Any] | None] = {
    "full cache": None,
    "merge": {},
    "merge, short window": {"window_size": 3},
    "merge, exact": {"window_size": None},
    "merge, delay 4": {"delay": 4},
    "merge, delay 16": {"delay": 16},
    "merge, exact, delay 1": {"delay": 1, "window_size": None},
    "drop, delay 4": {"action": "drop", "delay": 4},
    "drop, delay 16": {"action": "drop", "delay": 16},
}
TOLERANCE = 1e-4
LENGTHS = (5, 33, 18, 1)
GREEDY = SamplingParams(max_new_tokens=20, temperature=0)


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(method: str, make_stock: Any, make_compressed: Any) -> Any:
    gates = METHODS[method]
    return make_stock() if gates is None else make_compressed(gates=gates)


def scores(engine: Engine, prompts: list[list[int]], continuations: list[list[int]]) -> torch.Tensor:
    return torch.cat(engine.score(prompts, continuations))


def tokens_of(generations: list[Any]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


def test_closed_gate_equals_the_base_model(method: str, make_stock: Any, make_prompts: Any) -> None:
    base, (tokens,) = make_stock(), make_prompts(40)
    with torch.no_grad():
        for layer in base.model.layers:  # nothing in the borrowed neuron, nor in what RoPE turns into it
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight[7::16] = 0
                projection.weight[15::16] = 0
        expected = base(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
    gates = METHODS[method]
    closed = CompressionConfig(decision_offset=1e6, **(gates or {}))
    engine = Engine(base if gates is None else retrofit(copy.deepcopy(base), closed))
    torch.testing.assert_close(scores(engine, [tokens[:10]], [[*tokens[10:], 0]]), expected[9:], rtol=0, atol=TOLERANCE)
    for generation in engine.generate(make_prompts(*LENGTHS), GREEDY):
        assert (generation.stats.slots == generation.stats.tokens_seen).all()
        assert generation.stats.achieved_ratio == 1


# Chunks of 1 are token-by-token decoding; the others lie around the delays, windows and the page.
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 11, 12, 13, 16, 17, 40])
def test_chunked_prefill_equals_the_whole(model: Any, chunk: int, make_prompts: Any) -> None:
    prompts, continuations = make_prompts(1, 37), make_prompts(30, 5, seed=2)
    whole = scores(Engine(model), prompts, continuations)
    chunked = scores(Engine(model, prefill_chunk_size=chunk), prompts, continuations)
    torch.testing.assert_close(chunked, whole, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_prefill_equals_decoding(model: Any, chunk: int | None, make_prompts: Any) -> None:
    engine = Engine(model, prefill_chunk_size=chunk)
    prompts = make_prompts(*LENGTHS)
    generations = engine.generate(prompts, GREEDY)
    for score, generation in zip(engine.score(prompts, tokens_of(generations)), generations, strict=True):
        assert score.dtype == torch.float32
        assert score.argmax(-1).tolist() == generation.token_ids
        chosen = score[torch.arange(20), generation.token_ids]
        assert generation.logprobs == pytest.approx(chosen.tolist(), abs=TOLERANCE)


def test_batch_equals_its_sequences_alone(model: Any, make_prompts: Any) -> None:
    prompts = make_prompts(*LENGTHS)
    batch = Engine(model, max_batch_size=3, prefill_chunk_size=9, token_budget=11).generate(prompts, GREEDY)
    for prompt, together in zip(prompts, batch, strict=True):
        (alone,) = Engine(model).generate([prompt], GREEDY)
        assert together.token_ids == alone.token_ids
        assert together.logprobs == pytest.approx(alone.logprobs, abs=TOLERANCE)
        assert torch.equal(together.stats.slots, alone.stats.slots)
        assert together.stats.tokens_seen == alone.stats.tokens_seen == len(prompt) + 19


def test_blocks_are_what_the_slots_need_at_every_step_and_all_return(model: Any, make_prompts: Any) -> None:
    engine, seen = Engine(model, max_batch_size=2, prefill_chunk_size=10), []
    requests = [engine.submit(prompt, GREEDY) for prompt in make_prompts(*LENGTHS)]
    while any(request.generation is None for request in requests):
        engine.step()
        assert engine.blocks_in_use == int((-(-engine.cache.lengths // 16)).sum())
        seen.append(engine.blocks_in_use)
    assert max(seen) > 4
    assert seen[-1] == engine.blocks_in_use == 0
