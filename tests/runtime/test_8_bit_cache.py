"""An engine with pages of 8 bits obeys the laws of every other, in bytes that are counted."""

import functools

import pytest
from runtime import test_forks as forks
from runtime import test_laws as laws
from runtime import test_prefix_cache as prefixes

from dmc import Engine, SamplingParams, policies
from dmc.budget import Budget

Engine8 = functools.partial(Engine, kv_cache_dtype="int8")
METHODS = ("full cache", "merge", "merge, exact, delay 1", "drop, delay 4", "H2O", "KVzip", "merge, SnapKV")
QUICK = ("full cache", "merge, exact, delay 1", "H2O", "merge, SnapKV")
EVERY = [method if method in QUICK else pytest.param(method, marks=pytest.mark.slow) for method in METHODS]
ROUNDED = 0.02
"""A sum in another order may round a number to the other neighbor."""
COST = {"KVzip": 0.02}
"""Largest mean divergence from a float cache of tiny models, whose weights are large, in nats a token: of a method that
may keep another entry than it would. Of the others it is 0.002."""
GREEDY = SamplingParams(max_new_tokens=20, temperature=0)


@pytest.fixture(params=METHODS)
def method(request, monkeypatch):
    for module in (laws, forks, prefixes):
        monkeypatch.setattr(module, "Engine", Engine8)
    monkeypatch.setattr(laws, "TOLERANCE", ROUNDED)
    for module in (forks, prefixes):
        monkeypatch.setattr(module, "CLOSE", ROUNDED)
    return request.param


@pytest.fixture
def policy(method):
    return laws.of(method)[1]


@pytest.fixture
def model(method, make_stock, make_compressed):
    gates, _ = laws.of(method)
    return make_stock() if gates is None else make_compressed(gates=gates)


@pytest.mark.parametrize("method", EVERY, indirect=True)
@pytest.mark.filterwarnings("ignore:window=")
def test_the_laws_hold_on_8_bits(method, model, policy, make_prompts, make_stock, make_compressed):
    laws.test_alone_equals_together_equals_in_parts(method, model, policy, make_prompts)
    laws.test_an_answer_and_its_memory_are_the_same_generated_scored_preempted_or_in_a_turn(
        method, model, policy, make_prompts
    )
    forks.test_what_goes_on_from_a_session_equals_a_session_of_its_own(
        method, make_stock, make_compressed, make_prompts
    )


@pytest.mark.parametrize("method", ["full cache", "merge", "merge, exact, delay 1"], indirect=True)
def test_a_prefix_serves_all_that_begin_with_it(model, method, make_prompts):
    (prefix,) = make_prompts(150)
    prompts = [prefix + rest for rest in make_prompts(3, 5, 8, seed=2)]
    alone = Engine8(model, max_batch_size=1)
    engine = Engine8(model, prefix_cache=True)
    fed = prefixes.count_fed(engine)
    generations = engine.generate(prompts, GREEDY)
    prefixes.assert_same(generations, [alone.generate([prompt], GREEDY)[0] for prompt in prompts])
    assert sum(fed) < 2 * len(prefix)


def test_rounding_costs_little_and_bytes_are_about_a_quarter(method, model, policy, make_prompts):
    prompts, continuations = make_prompts(40, 30), make_prompts(20, 20, seed=2)
    full, small = (make(model, policy=policy).score_with_stats(prompts, continuations) for make in (Engine, Engine8))
    for exact, rounded in zip(full, small, strict=True):
        divergence = (exact.logprobs.exp() * (exact.logprobs - rounded.logprobs)).sum(-1).mean()
        assert 0 < divergence < COST.get(method, 0.002)
        if policy is None:
            assert rounded.stats.achieved_ratio == pytest.approx(exact.stats.achieved_ratio, rel=0.03)
    cache = Engine8(model, policy=policy).cache
    entries, block = [Field for Field in cache.layout.fields if Field.per == "slot"], cache.block_size
    assert cache.block_bytes == block * sum(entry.num_bytes(1) for entry in entries)
    share = cache.layout.entry_bytes / Engine(model, policy=policy).cache.layout.entry_bytes
    assert share == (16 + 4) / 64  # a scale weighs more where heads have 16 channels
    tensors = [cache.fields[name] for name in cache.fields.names("slot")]
    assert cache.block_bytes * cache.allocator.num_blocks == sum(tensor.nbytes for tensor in tensors)


def test_a_memory_holds_as_many_more_tokens(make_stock):
    model, memory = make_stock(), 2**20
    full, small = (make(model, memory=memory).cache.allocator.num_blocks for make in (Engine, Engine8))
    assert small == pytest.approx(full * 64 / 20, rel=0.02)


@pytest.mark.parametrize(
    "policy",
    [
        policies.D2O(budget=Budget(ratio=4)),
        policies.StreamingLLM(budget=Budget(ratio=4), rerotate=True),
        policies.Quest(budget=Budget(tokens=32)),
        policies.OmniKV(budget=Budget(ratio=4), filter_layers=(0,)),
        policies.InfLLM(budget=Budget(tokens=40), block_size=8, initial=4, local=12),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_policies_that_rewrite_entries_or_read_them_by_themselves_are_refused(policy, make_stock):
    with pytest.raises(ValueError, match=r"kv_cache_dtype='int8': \w+ needs .* use kv_cache_dtype='auto'"):
        Engine8(make_stock(num_layers=4), policy=policy)


def test_flash_refuses_8_bits(make_stock):
    with pytest.raises((ValueError, ImportError), match="flash"):
        Engine8(make_stock(), kernels="flash")
