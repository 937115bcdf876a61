"""Requests are let in by the compression ratio that is expected of them, and what follows where it was wrong."""

import pytest

from dmc import Engine, SamplingParams, policies
from dmc.budget import Budget
from dmc.runtime.allocator import OutOfBlocksError

HEADS = 4  # of all layers
QUARTER = {"decisions": "fixed", "weighting": "uniform", "window_size": None, "target_ratio": 4.0}
"""Groups of four tokens, whatever they say."""
HOPEFUL = {"decision_offset": 1e6, "target_ratio": 4.0}
"""Expected to merge, and never does."""


def engine_for(model, num_tokens, **options):
    """Make an engine whose memory holds so many tokens uncompressed."""
    return Engine(model, memory=HEADS * num_tokens // 16 * Engine(model).cache.block_bytes, **options)


def greedy(count):
    return SamplingParams(max_new_tokens=count, temperature=0)


def longest(engine, prompts):
    """Find the longest prompt that is answered with 20 tokens."""
    lengths = [0]
    for prompt in prompts:
        try:
            (generation,) = engine.generate([prompt], greedy(20))
        except (ValueError, OutOfBlocksError):
            break
        assert len(generation.token_ids) == 20 and generation.stats.num_preemptions == 0
        lengths.append(len(prompt))
    assert engine.blocks_in_use == 0
    return lengths[-1]


def test_the_longest_request_grows_with_the_compression_ratio(make_stock, make_compressed, make_prompts):
    full = longest(engine_for(make_stock(), 160), make_prompts(*range(121, 180, 10)))
    prompts = make_prompts(*range(430, 640, 30))
    for chunk in (None, 64):
        engine = engine_for(make_compressed(gates=QUARTER), 160, prefill_chunk_size=chunk)
        assert longest(engine, prompts) >= 3 * full == 3 * 141


def largest_batch(engine, prompts, least):
    """Find how many requests run together from the first token to the last, from `least` on."""
    for count in range(least, len(prompts) + 1):
        requests = [engine.submit(prompt, greedy(60)) for prompt in prompts[:count]]
        together = 0
        while any(request.generation is None for request in requests):
            engine.step()
            together = max(together, len(engine._scheduler.running))
        if together < count or any(request.generation.stats.num_preemptions for request in requests):
            return count - 1
    return len(prompts)


def test_the_largest_batch_grows_with_the_compression_ratio(make_stock, make_compressed, make_prompts):
    prompts, num_tokens = make_prompts(*[300] * 24), 5 * 368  # 359 tokens each
    full = largest_batch(engine_for(make_stock(), num_tokens), prompts, 5)
    compressed = largest_batch(engine_for(make_compressed(gates=QUARTER), num_tokens), prompts, 18)
    assert full == 5
    assert compressed >= 0.9 * 4 * full


@pytest.mark.parametrize("prefix_cache", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_request_that_outgrows_the_memory_ends_alone_and_keeps_its_tokens(
    prefix_cache, make_compressed, make_prompts
):
    model, prompts = make_compressed(gates=HOPEFUL), make_prompts(90, 20, 30)
    expected = Engine(model).generate(prompts, greedy(100))
    engine = engine_for(model, 128, prefix_cache=prefix_cache)
    requests = [engine.submit(prompts[0], greedy(100)), *(engine.submit(prompt, greedy(90)) for prompt in prompts[1:])]
    events = []
    while any(request.generation is None for request in requests):
        events += engine.step()
    large, *small = requests
    assert (large.generation.finish_reason, len(large.generation.token_ids)) == ("error", 128 - 90 + 1)
    assert large.generation.token_ids == expected[0].token_ids[:39]
    assert large.generation.stats.tokens_seen == 128
    assert isinstance(large.error, OutOfBlocksError)
    message = "a sequence of 129 tokens has outgrown the 32 blocks that memory= holds: it holds 128 entries per head"
    assert message in str(large.error)
    assert sum(event.request is large for event in events) == 39
    for request, alone in zip(small, expected[1:], strict=True):
        assert request.generation.token_ids == alone.token_ids[:90]
        assert request.error is None
    assert engine.blocks_in_use == 0
    with pytest.raises(OutOfBlocksError, match=r"request 1 of 3 \(from 0\): a sequence of"):
        engine.generate([prompts[1], prompts[0], prompts[2]], greedy(90))
    with pytest.raises(OutOfBlocksError, match="has outgrown"):
        engine.score(prompts[:1], [make_prompts(100)[0]])
    with engine.session() as session:
        with pytest.raises(OutOfBlocksError, match="has outgrown"):
            session.feed(make_prompts(200)[0])
        for _ in range(2):  # it rests, and holds all that there is
            with pytest.raises(OutOfBlocksError, match="has outgrown"):
                session.generate(prompts[1], greedy(2))
    assert engine.blocks_in_use == 0
    assert [generation.token_ids for generation in engine.generate(prompts[1:], greedy(90))] == [
        generation.token_ids[:90] for generation in expected[1:]
    ]


@pytest.mark.parametrize("chunk", [None, 32])
def test_a_policy_beside_gates_needs_room_for_the_whole_prompt(chunk, make_compressed, make_prompts):
    policy = policies.SnapKV(budget=Budget(ratio=2), window=4)
    engine = engine_for(make_compressed(), 128, policy=policy, prefill_chunk_size=chunk)
    with pytest.raises(ValueError, match="may need 36 blocks at CR 1,"):
        engine.generate(make_prompts(140), greedy(2))
    assert len(engine.generate(make_prompts(120), greedy(4))[0].token_ids) == 4


def test_what_cannot_be_expected_to_fit_is_refused(make_compressed, make_prompts):
    engine = engine_for(make_compressed(gates=HOPEFUL), 128)
    with pytest.raises(ValueError, match="may need 36 blocks at CR 4, and memory= holds"):
        engine.submit(make_prompts(500)[0], greedy(14))
    assert engine.step() == []
