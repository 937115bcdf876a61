"""The laws that every compression method obeys in the engine."""

import copy
import dataclasses
import itertools
import random
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from covering import cover
from evicting import write_scorer

from dmc import Engine, SamplingParams, policies, retrofit
from dmc.budget import Budget
from dmc.compression import CompressionConfig

GATES = {
    "full cache": None,
    "merge": {},
    "merge, short window": {"window_size": 3},
    "merge, exact": {"window_size": None},
    "merge, delay 4": {"delay": 4},
    "merge, delay 16": {"delay": 16},
    "merge, exact, delay 1": {"delay": 1, "window_size": None},
    "drop, delay 4": {"action": "drop", "delay": 4},
    "drop, delay 16": {"action": "drop", "delay": 16},
    "per layer": {"decisions": "per_layer"},
    "hidden": {"gate_input": "hidden"},
    "hidden, drop, delay 4": {"gate_input": "hidden", "action": "drop", "delay": 4},
    "both, per layer, delay 4": {"gate_input": "both", "decisions": "per_layer", "delay": 4},
    "query for the previous, drop, delay 5": {
        "gate_input": "query",
        "decided_token": "previous",
        "action": "drop",
        "delay": 5,
    },
    "fixed": {"decisions": "fixed", "weighting": "uniform", "window_size": None},
    "fixed, window, delay 4": {"decisions": "fixed", "weighting": "uniform", "delay": 4, "target_ratio": 2.5},
}
QUARTER = Budget(ratio=4)
FOLDER = TemporaryDirectory()
POLICIES = {
    "LocalWindow": policies.LocalWindow(budget=QUARTER),
    "StreamingLLM": policies.StreamingLLM(budget=QUARTER),
    "StreamingLLM, rerotate": policies.StreamingLLM(budget=QUARTER, rerotate=True),
    "H2O": policies.H2O(budget=QUARTER),
    "H2O, tokens": policies.H2O(budget=Budget(tokens=17)),
    "H2O, protected": policies.H2O(budget=QUARTER, protect=0.2, bounds=(3, 20)),
    "H2O, prompt only": policies.H2O(budget=QUARTER, evict_decoding=False),
    "TOVA": policies.TOVA(budget=QUARTER),
    "SnapKV": policies.SnapKV(budget=QUARTER),
    "PyramidKV": policies.PyramidKV(budget=QUARTER),
    "AdaKV": policies.AdaKV(budget=QUARTER),
    "CAKE": policies.CAKE(budget=QUARTER),
    "CAKE, cascading": policies.CAKE(budget=QUARTER, cascading=True),
    "VATP": policies.VATP(budget=QUARTER),
    "RoCo": policies.RoCo(budget=QUARTER),
    "CaM": policies.CaM(budget=QUARTER),
    "D2O": policies.D2O(budget=QUARTER),
    "LAVa": policies.LAVa(budget=QUARTER),
    "ExpectedAttention": policies.ExpectedAttention(budget=QUARTER, future=40),
    "KVzip": policies.KVzip(budget=QUARTER, sinks=2, chunk=11, lead=3, instruction=[5, 9]),
    "AttentionMatching": policies.AttentionMatching(budget=QUARTER, sinks=2, chunk=11, queries=20, instruction=[5, 9]),
    "KVpop": policies.KVpop(budget=QUARTER, scorer=write_scorer(Path(FOLDER.name) / "scorer")),
    "Random": policies.Random(budget=QUARTER),
    "Marked": policies.Marked(budget=QUARTER, markers=[3, 20, 21, 60], behind=[1, 2]),
    "LAVa, tokens": policies.LAVa(budget=Budget(tokens=17)),
    "D2O, tokens, protected": policies.D2O(budget=Budget(tokens=17), protect=0.25),
    "LAVa, protected": policies.LAVa(budget=QUARTER, protect=0.2, bounds=(3, 20)),
}
BOTH = {
    "merge, SnapKV": ({}, policies.SnapKV(budget=QUARTER, window=3)),
    "merge, exact, PyramidKV": ({"window_size": None}, policies.PyramidKV(budget=QUARTER, window=3)),
    "merge, delay 4, LAVa": ({"delay": 4}, policies.LAVa(budget=Budget(ratio=2.5), window=3)),
    "merge, exact, AttentionMatching": ({"window_size": None}, policies.AttentionMatching(budget=Budget(ratio=2.5))),
    "drop, delay 4, AttentionMatching": ({"action": "drop", "delay": 4}, policies.AttentionMatching(budget=QUARTER)),
    "drop, delay 4, AdaKV": ({"action": "drop", "delay": 4}, policies.AdaKV(budget=Budget(tokens=12), window=3)),
}
"""Gates decide token by token, the policy when the prompt ends."""
SPARSE = {"filter_layers": (0, 3), "offload": True, "prefill": "sparse", "chunk": 8, "chunks_read": 1}
BLOCKS = {"block_size": 4, "representatives": 2, "initial": 2, "local": 6, "chunk": 8}
READING = {
    "OmniKV": policies.OmniKV(budget=QUARTER, filter_layers=(0, 3)),
    "OmniKV, window": policies.OmniKV(budget=QUARTER, filter_layers=(0, 3), selector="exponential"),
    "OmniKV, offload": policies.OmniKV(budget=QUARTER, filter_layers=(0, 3), offload=True),
    "OmniKV, sparse": policies.OmniKV(budget=QUARTER, **SPARSE),
    "Quest": policies.Quest(budget=QUARTER, page_size=4),
    "InfLLM": policies.InfLLM(budget=QUARTER, **BLOCKS),
}
"""They drop nothing, and read a part."""
EIGHT_TOGETHER = ("OmniKV, sparse", "InfLLM")
METHODS = [*GATES, *POLICIES, *BOTH, *READING]
FEW = ("full cache", "merge", "merge, exact, delay 1", "drop, delay 4", "H2O", "SnapKV", "merge, delay 4, LAVa")
"""One of each kind."""
CHUNKS, KERNELS, FAMILIES = (None, 1, 4, 5, 13, 16, 17), ("cpu", "reference"), ("llama", "mistral", "qwen3")
"""Chunks of 1 are token by token; the others lie around the delays, windows and the page."""
PAIRS = cover(CHUNKS, KERNELS, FAMILIES)
CONDITIONS = dict(zip(METHODS, itertools.cycle(random.Random(0).sample(PAIRS, len(PAIRS))), strict=False))
"""Chunks, kernels and family under which a method is seen; over all methods all pairs of these stand."""
TOLERANCE = 1e-4
LENGTHS = (5, 33, 18, 1)
GREEDY, LONGER = (SamplingParams(max_new_tokens=count, temperature=0) for count in (12, 20))


@pytest.fixture(params=METHODS)
def method(request):
    return request.param


def of(method):
    return BOTH.get(method) or (GATES.get(method), POLICIES.get(method) or READING.get(method))


def layers_of(method):
    return {"InfLLM": 2, "Quest": 4}.get(method, 6 if method in READING else 2)


def chunk_of(method, size):
    """Round a size at which prompts are cut up to what some policies take together."""
    return size if size is None or method not in EIGHT_TOGETHER else -(-size // 8) * 8


@pytest.fixture
def model(method, make_stock, make_compressed):
    (gates, _), (*_, family) = of(method), CONDITIONS[method]
    if gates is None:
        return make_stock(family, num_layers=layers_of(method))
    return make_compressed(family, gates=gates)


@pytest.fixture
def policy(method):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of windows that do not fit
        yield of(method)[1]


def scores(engine, prompts, continuations):
    return torch.cat(engine.score(prompts, continuations))


def tokens_of(generations):
    return [generation.token_ids for generation in generations]


def test_closed_gate_or_budget_for_all_equals_the_base_model(method, policy, make_stock, make_prompts):
    chunk, kernels, family = CONDITIONS[method]
    base, (tokens,) = make_stock(family, num_layers=layers_of(method)), make_prompts(40)
    inputs = torch.tensor([tokens])
    with torch.no_grad():
        for layer in base.model.layers:  # nothing in the borrowed neuron, nor in what RoPE turns into it
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight[7::16] = 0
                projection.weight[15::16] = 0
        expected = base(inputs, use_cache=False).logits[0].log_softmax(-1)
    gates, _ = of(method)
    closed = CompressionConfig(**{"decision_offset": 1e6, **(gates or {}), "target_ratio": 1.0})
    policy = None if policy is None else dataclasses.replace(policy, budget=Budget(tokens=60))
    model = base if gates is None else retrofit(copy.deepcopy(base), closed)
    with torch.no_grad():
        parallel = model(inputs, use_cache=False).logits[0].log_softmax(-1)
    torch.testing.assert_close(parallel, expected, rtol=0, atol=TOLERANCE)
    engine = Engine(model, policy=policy, kernels=kernels, prefill_chunk_size=chunk_of(method, chunk))
    torch.testing.assert_close(scores(engine, [tokens[:10]], [[*tokens[10:], 0]]), expected[9:], rtol=0, atol=TOLERANCE)
    for generation in engine.generate(make_prompts(*LENGTHS), GREEDY):
        assert (generation.stats.slots == generation.stats.tokens_seen).all()
        assert generation.stats.achieved_ratio == 1


def run_and_count_blocks(engine, requests):
    """Check at every step that blocks are what the slots need; return the most, and whether all have returned."""
    most = 0
    while any(request.generation is None for request in requests):
        engine.step()
        assert engine.blocks_in_use == int((-(-engine.cache.lengths // 16)).sum())
        most = max(most, engine.blocks_in_use)
    return most, engine.blocks_in_use == 0


def test_alone_equals_together_equals_in_parts(method, model, policy, make_prompts):
    """A request gets the same tokens, probabilities and entries in whatever passes it is fed, and with whom.

    Whether its tokens are fed at once, in chunks, one by one or beside others, and whether its answer is generated or
    given and scored.
    """
    chunk, kernels, _ = CONDITIONS[method]
    prompts = make_prompts(18, 33, 18, 1)  # two of the same length may be fed together
    alone = [Engine(model, policy=policy).generate([prompt], GREEDY)[0] for prompt in prompts]
    answers = tokens_of(alone)
    scored = [
        Engine(model, policy=policy).score([prompt], [answer])[0]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    for scores, generation in zip(scored, alone, strict=True):
        assert scores.dtype == torch.float32
        assert scores.argmax(-1).tolist() == generation.token_ids
        assert generation.logprobs == pytest.approx(scores.amax(-1).tolist(), abs=TOLERANCE)
    engine = Engine(model, policy=policy, kernels=kernels, prefill_chunk_size=chunk_of(method, chunk))
    torch.testing.assert_close(torch.cat(engine.score(prompts, answers)), torch.cat(scored), rtol=0, atol=TOLERANCE)
    options = {"max_batch_size": 3, "prefill_chunk_size": chunk_of(method, 9), "token_budget": 19}
    crowded = Engine(model, policy=policy, kernels=kernels, **options)
    requests = [crowded.submit(prompt, GREEDY) for prompt in prompts]
    most, have_returned = run_and_count_blocks(crowded, requests)
    assert most > 4 and have_returned
    for request, expected in zip(requests, alone, strict=True):
        generation = request.generation
        assert generation.token_ids == expected.token_ids
        assert generation.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)
        assert torch.equal(generation.stats.slots, expected.stats.slots)
        assert generation.stats.tokens_seen == expected.stats.tokens_seen


@pytest.mark.parametrize("method", FEW)
def test_chunks_of_every_size_give_what_a_whole_text_gives(method, model, policy, make_prompts):
    prompts, answers = make_prompts(*LENGTHS, 18), make_prompts(*[20] * 5, seed=2)
    whole, *others = (
        torch.cat(Engine(model, policy=policy, prefill_chunk_size=chunk).score(prompts, answers)) for chunk in CHUNKS
    )
    for found in others:
        torch.testing.assert_close(found, whole, rtol=0, atol=TOLERANCE)


def most_entries(policy, prompt_length, tokens_seen):
    """Entries per head that a policy may hold on average after so many tokens."""
    if policy.grows and policy.evicts_decoding:
        return min(tokens_seen, policy.budget.entries(tokens_seen))
    limit = min(prompt_length, policy.budget.entries(prompt_length))
    if policy.evicts_decoding:
        return min(tokens_seen, policy.budget.entries(prompt_length))
    return limit + tokens_seen - prompt_length


SHORT = {"LAVa": 4, "LAVa, protected": 4, "LAVa, tokens": 4, "D2O": 4, "D2O, tokens, protected": 4}
"""Entries of all layers and heads, 2 of 2, that rounding shares down may cost."""


@pytest.mark.parametrize("method", POLICIES)
def test_entries_are_what_the_budget_says_at_every_step(method, model, policy, make_prompts):
    engine = Engine(model, policy=policy)
    attention = engine._runner._attention
    backend, most_attended = attention.backend, []

    def paged_attention(*arguments, rows, **options):
        most_attended.append((rows.tolist(), arguments[4][rows].amax(1).tolist()))
        return backend.paged_attention(*arguments, rows=rows, **options)

    attention.backend = SimpleNamespace(**{**vars(backend), "paged_attention": paged_attention})
    prompts = make_prompts(*LENGTHS, 60)
    requests = [engine.submit(prompt, GREEDY) for prompt in prompts]
    adaptive = policy.adapts_layers or method in (
        "PyramidKV",
        "AdaKV",
        "ExpectedAttention",
        "KVzip",
        "AttentionMatching",
    )
    while any(request.generation is None for request in requests):
        most_attended.clear()
        engine.step()
        for row, prompt in enumerate(prompts):
            seen = int(engine.cache.tokens_seen[row])
            if seen < len(prompt):
                continue
            held, most = engine.cache.lengths[:, row].long(), most_entries(policy, len(prompt), seen)
            assert 0 <= most * held.numel() - int(held.sum()) <= SHORT.get(method, 0)
            assert adaptive or (held == most).all()
            if policy.evicts_decoding and not adaptive:
                attended = [lengths[rows.index(row)] for rows, lengths in most_attended if row in rows]
                assert not attended or max(attended) <= most + 1
    for prompt, request in zip(prompts, requests, strict=True):
        stats = request.generation.stats
        assert stats.achieved_ratio == pytest.approx(stats.tokens_seen * 4 / int(stats.slots.sum()))
        if policy.grows and policy.evicts_decoding and policy.budget.ratio:
            assert stats.achieved_ratio >= 4 or stats.tokens_seen < 4


@pytest.mark.parametrize("method", FEW)
def test_memory_over_a_text_is_the_mean_of_what_single_steps_hold(method, model, policy, monkeypatch, make_prompts):
    prompts, continuations = make_prompts(9, 3), make_prompts(29, 20, seed=2)
    engine = Engine(model, policy=policy, prefill_chunk_size=1, max_batch_size=1)
    held = []

    def step_and_look():
        events = Engine.step(engine)
        if engine.cache.num_free_rows == 0:
            held.append((engine.cache.bytes_used(0), engine.cache.bytes_allocated(0), engine.cache.slots(0)))
        return events

    monkeypatch.setattr(engine, "step", step_and_look)
    oracles = []
    for prompt, continuation in zip(prompts, continuations, strict=True):
        held.clear()
        engine.score([prompt], [[*continuation, 0]])  # the last step's blocks have returned when it can be looked at
        oracles.append(held[len(prompt) - 1 : len(prompt) - 1 + len(continuation)])
    for chunk in (None, 7):
        scorings = Engine(model, policy=policy, prefill_chunk_size=chunk).score_with_stats(prompts, continuations)
        for scoring, steps, prompt in zip(scorings, oracles, prompts, strict=True):
            used, allocated, slots = zip(*steps, strict=True)
            stats, seen = scoring.stats, [len(prompt) + number for number in range(len(steps))]
            assert stats.mean_bytes_used == pytest.approx(sum(used) / len(used), abs=0.5)
            assert stats.mean_bytes_allocated == pytest.approx(sum(allocated) / len(allocated), abs=0.5)
            assert stats.peak_bytes_allocated == max(allocated)
            torch.testing.assert_close(stats.mean_slots, torch.stack(slots).double().mean(0))
            assert stats.mean_tokens_seen == sum(seen) / len(seen)


@pytest.mark.parametrize("method", [*FEW, *READING])
def test_an_answer_and_its_memory_are_the_same_generated_scored_preempted_or_in_a_turn(
    method, model, policy, make_prompts
):
    def over(stats):
        assert stats.mean_bytes_used <= stats.mean_bytes_allocated <= stats.peak_bytes_allocated
        return [stats.mean_tokens_seen, stats.mean_bytes_used, stats.mean_bytes_allocated, stats.peak_bytes_allocated]

    prompts, engine = make_prompts(21, 30, 8), Engine(model, policy=policy)
    generations = engine.generate(prompts, LONGER)
    alone = [over(generation.stats) for generation in generations]
    scorings = engine.score_with_stats(prompts, tokens_of(generations))
    assert [over(scoring.stats) for scoring in scorings] == [pytest.approx(value) for value in alone]
    room = 2 * layers_of(method) * 4 * engine.cache.block_bytes  # the longest alone: two heads, 49 tokens
    again = Engine(model, policy=policy, memory=room).generate(prompts, LONGER)
    assert method in POLICIES or method in BOTH or any(scoring.stats.num_preemptions for scoring in again)
    assert tokens_of(again) == tokens_of(generations)
    assert all(torch.equal(one.stats.slots, other.stats.slots) for one, other in zip(again, generations, strict=True))
    assert [over(scoring.stats) for scoring in again] == [pytest.approx(value) for value in alone]
    with engine.session() as session:
        session.generate(prompts[0], LONGER)
        second = session.generate(prompts[2], LONGER).stats
        seen = [49 + number for number in range(20)]  # 21 and 20 tokens, of the second turn's prompt 8
        assert second.mean_tokens_seen == sum(seen) / 20
