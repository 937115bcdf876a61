"""Several continuations of one prompt: each is what a request of its own would be, the prompt is held once."""

import pytest
import torch
from runtime.test_laws import layers_of, of
from runtime.test_prefix_cache import count_fed

from dmc import Engine, SamplingParams

KINDS = ["full cache", "merge", "merge, exact, delay 1", "merge, delay 4", "query for the previous, drop, delay 5"]
KINDS += [
    "fixed, window, delay 4",
    "H2O",
    "H2O, protected",
    "SnapKV",
    "StreamingLLM, rerotate",
    "D2O",
    "KVzip",
    "merge, SnapKV",
]
KINDS += ["OmniKV, window", "OmniKV, offload", "Quest", "InfLLM"]
"""One for each kind of state that a fork takes along."""
FROM_SESSIONS = ("full cache", "merge, exact, delay 1", "fixed, window, delay 4", "H2O, protected", "KVzip")
FROM_SESSIONS += ("OmniKV, offload", "InfLLM")
"""The others are slow: with them goes on what the test before has seen in continuations."""
CLOSE = 2e-5  # float32 sums in another order: 1.43e-5 seen on a processor, with OmniKV


@pytest.mark.parametrize("method", KINDS)
@pytest.mark.filterwarnings("ignore:window=", "ignore:sinks=")
def test_continuations_equal_requests_of_their_own(method, make_stock, make_compressed, make_prompts):
    (gates, policy), layers = of(method), layers_of(method)
    model = make_stock(num_layers=layers) if gates is None else make_compressed(gates=gates, num_layers=layers)
    prompts = make_prompts(50)
    alone, engine = Engine(model, policy=policy, max_batch_size=1), Engine(model, policy=policy, max_batch_size=3)
    few = Engine(model, policy=policy, max_batch_size=2)  # not all have a row
    several = SamplingParams(max_new_tokens=9, seed=5, n=3)
    expected = [
        [alone.generate([prompt], SamplingParams(max_new_tokens=9, seed=seed))[0] for seed in (5, 6, 7)]
        for prompt in prompts
    ]
    fed = count_fed(engine)
    for tested in (engine, few):
        for generation, theirs in zip(tested.generate(prompts, several), expected, strict=True):
            mine = [generation, *generation.alternatives]
            for ours, reference in zip(mine, theirs, strict=True):
                assert ours.token_ids == reference.token_ids
                assert ours.logprobs == pytest.approx(reference.logprobs, abs=CLOSE)
                assert torch.equal(ours.stats.slots, reference.stats.slots)
                torch.testing.assert_close(ours.stats.mean_slots, reference.stats.mean_slots)
                assert (ours.alternatives == [] and ours.finish_reason == "length") or ours is generation
        assert tested.blocks_in_use == 0 and not tested.cache.allocator.extra.any()
    if policy is None:
        assert sum(fed) == 50 + 3 * 8


@pytest.mark.parametrize(
    "method", [kind if kind in FROM_SESSIONS else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
@pytest.mark.filterwarnings("ignore:window=", "ignore:sinks=")
def test_what_goes_on_from_a_session_equals_a_session_of_its_own(method, make_stock, make_compressed, make_prompts):
    (gates, policy), layers = of(method), layers_of(method)
    model = make_stock(num_layers=layers) if gates is None else make_compressed(gates=gates, num_layers=layers)
    context, *questions = make_prompts(50, 5, 9, 6)
    greedy, expected = SamplingParams(max_new_tokens=4, temperature=0.0), []
    for question in questions:
        with Engine(model, policy=policy).session() as session:
            session.feed(context)
            expected.append(session.generate(question, greedy))
    for size in (4, 2):  # not all have a row
        engine = Engine(model, policy=policy, max_batch_size=size)
        fed = count_fed(engine)
        with engine.session() as session:
            session.feed(context)
            forks = [session.fork() for _ in questions]
            requests = [engine.submit(question, greedy, fork) for question, fork in zip(questions, forks, strict=True)]
            engine.run(requests)
            assert session.tokens == context
            for fork in forks:
                fork.close()
            spent = sum(fed)
            forks, right = [session.fork() for _ in questions], [request.generation.token_ids for request in requests]
            scorings = engine.score_with_stats(forks, right, after=questions)
            for fork in forks:
                fork.close()
        alone = Engine(model, policy=policy).score_with_stats([context] * 3, right, after=questions)
        for scoring, single in zip(scorings, alone, strict=True):
            torch.testing.assert_close(scoring.logprobs, single.logprobs, atol=CLOSE, rtol=0)
            assert torch.equal(scoring.stats.slots, single.stats.slots)
            torch.testing.assert_close(scoring.stats.mean_slots, single.stats.mean_slots)
        for request, single in zip(requests, expected, strict=True):
            ours = request.generation
            assert ours.token_ids == single.token_ids and ours.logprobs == pytest.approx(single.logprobs, abs=CLOSE)
            assert torch.equal(ours.stats.slots, single.stats.slots)
            torch.testing.assert_close(ours.stats.mean_slots, single.stats.mean_slots)
        assert engine.blocks_in_use == 0 and not engine.cache.allocator.extra.any()
        if size == 4 and (policy is None or policy.can_fork):
            assert spent == 50 + 5 + 9 + 6 + 3 * 3 and sum(fed) == 2 * spent - 50
    with pytest.raises(ValueError, match="the session is closed"):
        session.fork()


@pytest.mark.parametrize("gates", [None, {}, {"action": "drop", "delay": 4}], ids=str)
def test_the_prompt_of_several_is_held_once(gates, make_stock, make_compressed, make_prompts):
    engine = Engine(make_stock() if gates is None else make_compressed(gates=gates))
    request = engine.submit(make_prompts(400)[0], SamplingParams(max_new_tokens=4, n=8, seed=1))
    engine.step()
    assert len(request.alternatives) == 7
    counts = -(-engine.cache.lengths // 16)
    assert int(counts[:, :8].min()) > 1
    assert engine.blocks_in_use <= int(counts[:, 0].sum()) + 7 * 4
    events = []
    while request.generation is None:
        events += engine.step()
    assert {event.number for event in events} == set(range(8)) and {event.request for event in events} == {request}
    assert engine.blocks_in_use == 0


@pytest.mark.parametrize("gates", [None, {"delay": 4}], ids=str)
def test_a_continuation_without_a_place_that_ends_at_once_tells_what_the_prompt_held(
    gates, make_stock, make_compressed, make_prompts
):
    model, prompts = make_stock() if gates is None else make_compressed(gates=gates), make_prompts(50)
    (expected,) = Engine(model).generate(prompts, SamplingParams(max_new_tokens=1, seed=3))
    (first,) = Engine(model, max_batch_size=2).generate(prompts, SamplingParams(max_new_tokens=1, seed=3, n=4))
    for generation in (first, *first.alternatives):
        ours, theirs = (vars(stats).copy() for stats in (generation.stats, expected.stats))
        for name in ("slots", "mean_slots"):
            assert torch.equal(ours.pop(name), theirs.pop(name))
        assert ours == theirs


def test_several_are_taken_off_together_and_told_apart(make_compressed, make_prompts):
    engine, (prompt,) = Engine(make_compressed(), max_batch_size=2), make_prompts(30)
    params = SamplingParams(max_new_tokens=6, n=3, seed=2, top_logprobs=2)
    (expected,) = engine.generate([prompt], params)
    tokens = {0: [], 1: [], 2: []}
    for event in engine.stream(prompt, params):
        tokens[event.number].append(event.token_id)
        assert len(event.top_logprobs) == 2
    assert list(tokens.values()) == [generation.token_ids for generation in (expected, *expected.alternatives)]
    assert all(len(alternative.top_logprobs) == 6 for alternative in expected.alternatives)
    running = engine.submit(prompt, params)
    engine.step()
    engine.run(running.alternatives)
    assert running.generation.token_ids == expected.token_ids
    early, request = engine.submit(prompt, params), engine.submit(prompt, params)
    engine.abort(early)
    assert early.generation.alternatives == []
    for _ in range(3):
        engine.step()
    engine.abort(request)
    generations = [request.generation, *request.generation.alternatives]
    assert [generation.finish_reason for generation in generations] == ["abort"] * 3
    assert generations[2].token_ids == expected.alternatives[1].token_ids[:1]  # which waits for a row
    assert engine.blocks_in_use == 0 and engine.step() == []


def test_a_processor_that_fails_ends_its_request_alone(make_compressed, make_prompts):
    def fail_late(tokens, scores):
        if tokens.shape[1] > 12:
            raise KeyError("lost")
        return scores

    engine, prompts = Engine(make_compressed()), make_prompts(10, 20)
    greedy, broken = (
        SamplingParams(max_new_tokens=8, temperature=0, logits_processor=processor) for processor in (None, fail_late)
    )
    expected = engine.generate(prompts, greedy)
    requests = [engine.submit(prompts[0], broken), engine.submit(prompts[1], greedy)]
    with pytest.raises(
        RuntimeError, match=r"request 0 of 2 \(from 0\): logits_processor=.* failed: KeyError\('lost'\)"
    ):
        engine.run(requests)
    assert requests[0].generation.token_ids == expected[0].token_ids[:3]
    assert requests[0].generation.finish_reason == "error"
    assert requests[1].generation.token_ids == expected[1].token_ids
    assert engine.blocks_in_use == 0
