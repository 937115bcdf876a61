"""What requests share is computed once, and each brings what it would alone."""

import dataclasses
import gc
import weakref

import pytest
import torch

from dmc import Engine, SamplingParams, policies
from dmc.budget import Budget
from dmc.ranks import Ranks

GREEDY = SamplingParams(max_new_tokens=6, temperature=0)
METHODS = {
    "full cache": None,
    "merge": {},
    "merge, exact": {"window_size": None},
    "merge, delay 4": {"delay": 4},
    "drop, delay 16": {"action": "drop", "delay": 16},
}
CLOSE = 1e-5


@pytest.fixture(
    params=[pytest.param(method, marks=[pytest.mark.slow] * (method == "merge, exact")) for method in METHODS]
)
def model(request, make_stock, make_compressed):
    gates = METHODS[request.param]
    return make_stock() if gates is None else make_compressed(gates=gates)


def count_fed(engine):
    """Tokens of each pass from now on."""
    fed, forward = [], engine._runner.forward

    def counting(chunks):
        fed.append(sum(len(chunk.tokens) for chunk in chunks))
        return forward(chunks)

    engine._runner.forward = counting
    return fed


def assert_same(generations, expected):
    for ours, theirs in zip(generations, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=CLOSE)
        assert torch.equal(ours.stats.slots, theirs.stats.slots)
        assert ours.stats.tokens_seen == theirs.stats.tokens_seen
        torch.testing.assert_close(ours.stats.mean_slots, theirs.stats.mean_slots)


def test_a_prefix_of_many_requests_is_computed_once(model, make_prompts):
    (prefix,) = make_prompts(512)
    prompts = [prefix + rest for rest in make_prompts(*range(3, 11), seed=2)]
    alone = Engine(model, max_batch_size=1)
    expected = [alone.generate([prompt], GREEDY)[0] for prompt in prompts]
    engine = Engine(model, prefix_cache=True)
    fed = count_fed(engine)
    requests = [engine.submit(prompt, GREEDY) for prompt in prompts]
    most = 0
    while any(request.generation is None for request in requests):
        engine.step()
        cache, rows = engine.cache, [sequence.row for sequence in engine._scheduler.running]
        tables = {block for row in rows for block in cache._owned_blocks(row).tolist()}
        assert engine.blocks_in_use == len(tables)  # shared ones once
        most = max(most, len(tables))
    assert_same([request.generation for request in requests], expected)
    assert sum(fed) == 512 + sum(range(3, 11)) + 8 * 5
    largest = max(generation.stats.bytes_allocated for generation in expected) // cache.block_bytes
    assert most <= largest + 8 * 4 * 3  # the prefix once, and of each its open block and at most two more in 4 heads
    assert engine.blocks_in_use == 0
    assert engine.prefix_cache_bytes > 0


def test_a_prefix_is_found_by_those_who_come_later(model, make_prompts):
    """Known once it was seen twice, or where a chunk ended; a conversation that is sent again goes on from its end."""
    (prefix,), engine = make_prompts(160), Engine(model, prefix_cache=True)
    prompts = [prefix + rest for rest in make_prompts(20, 9, 30, seed=2)]
    expected = Engine(model).generate(prompts, GREEDY)
    fed, counts = count_fed(engine), []
    generations = []
    for prompt in prompts:
        generations += engine.generate([prompt], GREEDY)
        counts.append(sum(fed) - sum(counts))
    assert_same(generations, expected)
    gated = getattr(model.config, "compression", None) is not None
    assert counts == [180 + 5, (169 if gated else 9) + 5, 30 + 5]
    again = prompts[2] + generations[2].token_ids + make_prompts(7, seed=3)[0]
    (expected_again,) = Engine(model).generate([again], GREEDY)
    fed.clear()
    assert_same(engine.generate([again], GREEDY), [expected_again])
    assert sum(fed) == 1 + 7 + 5  # the last token of an answer has not been fed
    fed.clear()
    assert_same(engine.generate([prompts[0]] * 3, GREEDY), expected[:1] * 3)
    assert sum(fed) <= 20 + 2 * 16 + 3 * 5


def test_scores_go_on_from_what_prompts_share(model, make_prompts):
    (prompt,), continuations = make_prompts(300), make_prompts(4, 9, 2, 7, seed=2)
    engine = Engine(model, prefix_cache=True, token_budget=96)
    fed = count_fed(engine)
    scores = engine.score([prompt] * 4, continuations)
    for score, expected in zip(scores, Engine(model).score([prompt] * 4, continuations), strict=True):
        torch.testing.assert_close(score, expected, rtol=0, atol=CLOSE)
    assert sum(fed) <= 300 + 4 * (300 % 16 + 9)
    assert engine.blocks_in_use == 0


def test_what_prefixes_hold_is_given_up_for_others(model, make_prompts):
    heads = 4
    layout = Engine(model).cache
    memory = heads * 14 * layout.block_bytes  # one of 200 tokens and a little more
    engine, free = Engine(model, memory=memory, prefix_cache=True), Engine(model)
    prompts = make_prompts(150, 120, 150, 200, seed=4)
    prompts.append(prompts[3][:170] + prompts[0][:20])
    for prompt in prompts:
        assert_same(engine.generate([prompt], GREEDY), free.generate([prompt], GREEDY))
        assert engine.blocks_in_use == 0
    assert_same(engine.generate(prompts, GREEDY), free.generate(prompts, GREEDY))
    cache = engine.cache
    while engine._prefixes.reclaim():
        pass
    assert cache.allocator.num_in_use == 0 and not cache.allocator.extra.any()


def test_a_pool_that_grows_does_not_grow_for_prefixes(make_compressed, make_prompts):
    engine = Engine(make_compressed(), prefix_cache=True, max_batch_size=2)
    for prompt in make_prompts(*[400] * 14):
        engine.generate([prompt], SamplingParams(max_new_tokens=1))
    assert engine.cache.allocator.num_blocks <= 512


@pytest.mark.parametrize("scores", [False, True])
def test_what_was_no_number_is_kept_for_nobody(scores, model, make_prompts):
    (prefix,), (more, other) = make_prompts(130), make_prompts(20, 9, seed=2)
    expected = Engine(model).generate([prefix + more, prefix + other], GREEDY)
    engine, weight = Engine(model, prefix_cache=True), model.model.layers[0].self_attn.v_proj.weight
    before = weight.detach().clone()
    weight.data.fill_(float("nan"))
    if scores:
        engine.score([prefix + more], [other])
    else:
        with pytest.raises(ArithmeticError):
            engine.generate([prefix + more], GREEDY)
    weight.data.copy_(before)
    assert_same(engine.generate([prefix + more, prefix + other], GREEDY), expected)


@pytest.mark.parametrize(
    "bad",
    [
        {"repetition_penalty": 1e-300},
        {"logits_processor": lambda tokens, scores: scores[0]},
        {"logits_processor": lambda tokens, scores: scores - torch.inf},
    ],
    ids=lambda bad: next(iter(bad)),
)
def test_a_request_that_fails_by_its_own_parameters_costs_nobody_a_prefix(bad, make_stock, make_prompts):
    (prompt,) = make_prompts(100)
    engine = Engine(make_stock(), prefix_cache=True)
    engine.generate([prompt], GREEDY)
    held = engine.prefix_cache_bytes
    request = engine.submit(prompt, SamplingParams(max_new_tokens=6, temperature=0, **bad))
    while request.generation is None:
        engine.step()
    assert request.error is not None
    assert engine.prefix_cache_bytes >= held > 0


@pytest.mark.parametrize("holder", ["a session that rests", "its own rest"])
def test_a_request_does_not_give_up_the_prefix_that_it_goes_on_from(holder, make_stock, make_prompts):
    """Others make room first; of what is longer than the prefix, the rest does."""
    model, (prefix, other, first, second) = make_stock(), make_prompts(320, 200, 150, 230)
    engine = Engine(model, memory=4 * 40 * Engine(model).cache.block_bytes, prefix_cache=True)
    is_session = holder.startswith("a session")
    session = engine.session()
    engine.generate([prefix if is_session else prefix + first], SamplingParams(max_new_tokens=1))
    if is_session:
        session.feed(other)
    (expected,) = Engine(model).generate([prefix + second], GREEDY)
    fed = count_fed(engine)
    assert_same(engine.generate([prefix + second], GREEDY), [expected])
    assert sum(fed) == 230 + 5
    session.close()
    assert engine.blocks_in_use == 0


def test_who_waits_for_a_prefix_keeps_nobody_back(model, make_prompts):
    prefix, more, short = make_prompts(320, 9, 12)
    engine = Engine(model, prefix_cache=True, prefill_chunk_size=64)
    fed = count_fed(engine)
    first, second, third = (engine.submit(prompt, GREEDY) for prompt in (prefix, prefix + more, short))
    engine.step()
    running = engine._scheduler.running
    assert [sequence in running for sequence in (first.sequence, second.sequence, third.sequence)] == [
        True,
        False,
        True,
    ]
    engine.run([first, second, third])
    assert_same(
        [request.generation for request in (first, second, third)],
        Engine(model).generate([prefix, prefix + more, short], GREEDY),
    )
    assert sum(fed) <= 320 + 9 + 12 + 3 * 5 + 16


def test_other_weights_need_an_empty_prefix_cache(model, make_prompts):
    (prompt,), engine = make_prompts(150), Engine(model, prefix_cache=True)
    engine.generate([prompt], GREEDY)
    model.model.layers[0].self_attn.v_proj.weight.data.mul_(-1)
    engine.clear_prefix_cache()
    assert engine.prefix_cache_bytes == 0
    assert_same(engine.generate([prompt], GREEDY), Engine(model).generate([prompt], GREEDY))


def test_what_snapshots_hold_beside_their_blocks_is_bounded(make_compressed, make_prompts):
    model = make_compressed(gates={"action": "drop", "delay": 256})
    engine = Engine(model, memory=2**20, max_batch_size=2, prefix_cache=True)
    for prompt in make_prompts(*[80] * 40):
        engine.generate([prompt], SamplingParams(max_new_tokens=1))
    assert 0 < sum(prefix.num_bytes for prefix in engine._prefixes) <= 2**20 / 4


class BesideAFullRank(Ranks):
    """One of two ranks, the other of which has taken all that it may for states."""

    def all_reduce(self, value, op="sum"):
        return max(value, 1) if op == "max" else value


def test_ranks_drop_the_same_prefixes(make_compressed, make_prompts):
    engine = Engine(make_compressed(), prefix_cache=True)
    engine.cache.layout = dataclasses.replace(engine.cache.layout, ranks=BesideAFullRank())
    for prompt in make_prompts(100, 120):
        engine.generate([prompt], GREEDY)
    assert engine.prefix_cache_bytes == 0


def test_an_engine_with_a_prefix_cache_goes_with_its_last_reference(make_stock, make_prompts):
    engine = Engine(make_stock(), prefix_cache=True)
    engine.generate(make_prompts(80), GREEDY)
    cache = weakref.ref(engine.cache)
    gc.collect()
    gc.disable()
    try:
        del engine
        assert cache() is None
    finally:
        gc.enable()


def test_continuations_take_the_place_of_prefixes(make_stock, make_prompts):
    model, params = make_stock(), SamplingParams(max_new_tokens=4, n=6, temperature=0)
    memory = 4 * 40 * Engine(model).cache.block_bytes
    engine, *others = Engine(model, memory=memory, prefix_cache=True), *make_prompts(*[120] * 8, seed=3)
    for other in others:
        engine.generate([other], GREEDY)
    fed = count_fed(engine)
    engine.generate(make_prompts(120), params)
    assert sum(fed) == 120 + 6 * 3


def test_sessions_and_interrupts_leave_prefixes_sound(model, make_prompts):
    engine, (prefix, more, rest) = Engine(model, prefix_cache=True), make_prompts(130, 40, 9)
    (expected,) = Engine(model).generate([prefix + more], GREEDY)
    with engine.session() as session:
        session.feed(prefix)
        assert_same([session.generate(more, GREEDY)], [expected])
    assert_same(engine.generate([prefix + more], GREEDY), [expected])
    hook = model.lm_head.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.generate([prefix + rest], GREEDY)
    hook.remove()
    assert engine.blocks_in_use == engine.prefix_cache_bytes == engine.cache.allocator.num_in_use == 0
    assert_same(engine.generate([prefix + more], GREEDY), [expected])


@pytest.mark.parametrize("policy", [policies.H2O(budget=Budget(ratio=2)), policies.SnapKV(budget=Budget(ratio=2))])
def test_what_a_policy_has_compressed_is_computed_again(policy, make_stock, make_prompts):
    (prefix,), model = make_prompts(150), make_stock()
    prompts = [prefix + rest for rest in make_prompts(9, 20, seed=2)]
    expected = Engine(model, policy=policy).generate(prompts, GREEDY)
    assert_same(Engine(model, policy=policy, prefix_cache=True).generate(prompts, GREEDY), expected)
