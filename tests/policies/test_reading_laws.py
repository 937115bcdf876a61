"""The laws of policies that drop nothing and read part of the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dmc import Engine, SamplingParams
from dmc.budget import Budget
from dmc.policies import InfLLM, OmniKV, Quest

TOLERANCE = 1e-4
LENGTHS = (37, 20, 1, 44)
GREEDY = SamplingParams(max_new_tokens=12, temperature=0)
OMNI = {"filter_layers": (0, 3)}
SPARSE = {**OMNI, "prefill": "sparse", "chunk": 8, "chunks_read": 1}
BLOCKS = {"block_size": 4, "representatives": 2, "initial": 2, "local": 6, "chunk": 8}
METHODS: dict[str, Callable[[Budget], Any]] = {
    "OmniKV": lambda budget: OmniKV(budget=budget, **OMNI),
    "OmniKV, window": lambda budget: OmniKV(budget=budget, selector="exponential", **OMNI),
    "OmniKV, lazy": lambda budget: OmniKV(budget=budget, lazy_reload=0.4, offload=True, **OMNI),
    "OmniKV, offload": lambda budget: OmniKV(budget=budget, offload=True, **OMNI),
    "OmniKV, sparse": lambda budget: OmniKV(budget=budget, offload=True, **SPARSE),
    "Quest": lambda budget: Quest(budget=budget, page_size=4),
    "InfLLM": lambda budget: InfLLM(budget=budget, **BLOCKS),
}


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def policy(method: str) -> Any:
    return METHODS[method](Budget(ratio=4))


@pytest.fixture
def model(make_stock: Any) -> Any:
    return make_stock(num_layers=6)


def assert_alike(ours: list[Any], theirs: list[Any]) -> None:
    for our, their in zip(ours, theirs, strict=True):
        assert our.token_ids == their.token_ids
        assert our.logprobs == pytest.approx(their.logprobs, abs=TOLERANCE)
        assert torch.equal(our.stats.slots, their.stats.slots)


def chunks_for(method: str) -> tuple[int, ...]:
    """Sizes at which prompts may be cut: some policies take eight tokens together."""
    return (8, 16) if method in ("OmniKV, sparse", "InfLLM") else (1, 7, 16)


def test_a_budget_beyond_the_prompt_is_full_attention(method: str, model: Any, make_prompts: Any) -> None:
    prompts, continuations = make_prompts(*LENGTHS), make_prompts(*LENGTHS, seed=2)
    if method == "OmniKV, sparse":
        prompts = [prompt[:16] for prompt in prompts]
    policy = METHODS[method](Budget(tokens=200))
    expected = torch.cat(Engine(model).score(prompts, continuations))
    actual = torch.cat(Engine(model, policy=policy).score(prompts, continuations))
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def test_the_method_does_something_and_drops_nothing(policy: Any, model: Any, make_prompts: Any) -> None:
    prompts = make_prompts(*LENGTHS)
    full, part = Engine(model).generate(prompts, GREEDY), Engine(model, policy=policy).generate(prompts, GREEDY)
    assert any(ours.token_ids != theirs.token_ids for ours, theirs in zip(part, full, strict=True))
    for generation in part:
        stats = generation.stats
        assert (stats.slots == stats.tokens_seen).all()
        assert stats.achieved_ratio == 1
        assert stats.bytes_used <= stats.bytes_allocated
        assert stats.bytes_fast <= stats.bytes_allocated


def test_chunked_prefill_equals_the_whole(method: str, policy: Any, model: Any, make_prompts: Any) -> None:
    prompts, continuations = make_prompts(1, 37), make_prompts(12, 5, seed=2)
    whole = torch.cat(Engine(model, policy=policy).score(prompts, continuations))
    for chunk in chunks_for(method):
        chunked = Engine(model, policy=policy, prefill_chunk_size=chunk, token_budget=19)
        torch.testing.assert_close(torch.cat(chunked.score(prompts, continuations)), whole, rtol=0, atol=TOLERANCE)


def test_scores_equal_decoding(policy: Any, model: Any, make_prompts: Any) -> None:
    engine, prompts = Engine(model, policy=policy), make_prompts(*LENGTHS)
    generations = engine.generate(prompts, GREEDY)
    tokens = [generation.token_ids for generation in generations]
    for score, generation in zip(engine.score(prompts, tokens), generations, strict=True):
        assert score.argmax(-1).tolist() == generation.token_ids
        chosen = score[torch.arange(12), generation.token_ids]
        assert generation.logprobs == pytest.approx(chosen.tolist(), abs=TOLERANCE)


def test_batch_equals_its_sequences_alone(policy: Any, model: Any, make_prompts: Any) -> None:
    prompts = make_prompts(*LENGTHS, 20)  # two of the same length are fed together
    batch = Engine(model, policy=policy, max_batch_size=4, token_budget=60).generate(prompts, GREEDY)
    alone = [Engine(model, policy=policy).generate([prompt], GREEDY)[0] for prompt in prompts]
    assert_alike(batch, alone)


def test_preempted_sequences_continue_as_if_they_had_never_stopped(policy: Any, model: Any, make_prompts: Any) -> None:
    prompts, params = make_prompts(30, 12), SamplingParams(max_new_tokens=20, temperature=0)
    free = Engine(model, policy=policy)
    blocks = 6 * 2 * -(-(30 + 19) // 16)  # the longest sequence fits alone
    tight = Engine(model, policy=policy, memory=blocks * free.cache.block_bytes)
    generations = tight.generate(prompts, params)
    assert sum(generation.stats.num_preemptions for generation in generations) > 0
    assert_alike(generations, free.generate(prompts, params))
    assert tight.blocks_in_use == 0


def test_a_conversation_is_the_same_after_it_was_evicted(
    method: str, policy: Any, model: Any, make_prompts: Any
) -> None:
    turns, (other,) = make_prompts(30, 9, 17), make_prompts(10, seed=3)

    def converse(engine: Engine, disturb: bool) -> list[Any]:
        with engine.session() as session:
            generations = []
            for turn in turns:
                generations.append(session.generate(turn, SamplingParams(max_new_tokens=4, temperature=0)))
                if disturb:
                    engine.generate([other], SamplingParams(max_new_tokens=2))
        assert engine.blocks_in_use == 0
        return generations

    expected = converse(Engine(model, policy=policy), disturb=False)
    chunk = chunks_for(method)[-1]
    evicted = converse(Engine(model, policy=policy, max_batch_size=1, prefill_chunk_size=chunk), disturb=True)
    assert_alike(evicted, expected)
    assert any(generation.stats.num_preemptions for generation in evicted)


def test_blocks_are_what_pages_need_at_every_step_and_all_return(policy: Any, model: Any, make_prompts: Any) -> None:
    engine = Engine(model, policy=policy, max_batch_size=2)
    requests = [engine.submit(prompt, GREEDY) for prompt in make_prompts(*LENGTHS)]
    for step in range(20):
        engine.step()
        assert engine.blocks_in_use == int((-(-engine.cache.lengths // 16)).sum())
        if step == 5:
            engine.abort(requests[0])
    while any(request.generation is None for request in requests):
        engine.step()
    assert engine.blocks_in_use == 0
    (alone,) = Engine(model, policy=policy).generate([requests[3].prompt], GREEDY)
    assert_alike([requests[3].generation], [alone])


def test_every_backend_reads_the_same(method: str, policy: Any, model: Any, make_prompts: Any) -> None:
    prompts, continuations = make_prompts(45, 20), make_prompts(6, 9, seed=2)
    expected = torch.cat(Engine(model, policy=policy, kernels="reference").score(prompts, continuations))
    actual = torch.cat(Engine(model, policy=policy, kernels="cpu").score(prompts, continuations))
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def test_compressed_models_are_refused(policy: Any, make_compressed: Any) -> None:
    with pytest.raises(ValueError, match="the gates of DMCLlamaForCausalLM decide"):
        Engine(make_compressed(), policy=policy)
