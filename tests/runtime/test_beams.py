"""Beam search: the continuations are transformers' and a naive step loop's; beams are forks that share their blocks."""

import math

import pytest
import torch
from runtime.test_laws import layers_of, of
from runtime.test_prefix_cache import count_fed

from dmc import Engine, SamplingParams

CLOSE = 1e-4
METHODS = ["full cache", "merge, exact, delay 1", "drop, delay 4", "H2O", "InfLLM"]


def build(method, make_stock, make_compressed):
    (gates, policy), layers = of(method), layers_of(method)
    return make_stock(num_layers=layers) if gates is None else make_compressed(gates=gates, num_layers=layers), policy


def beam_search(next_logprobs, width, length, ends=(), penalty=1.0):
    """Return (score, tokens) of the best continuations, every step computed anew by `next_logprobs(tokens)`."""
    beams, ended = [(0.0, [])], []
    for count in range(1, length + 1):
        every = [
            (total + float(logprob), [*tokens, token])
            for total, tokens in beams
            for token, logprob in enumerate(next_logprobs(tokens))
        ]
        every.sort(key=lambda each: -each[0])
        closed = [count == length or tokens[-1] in ends for _, tokens in every]
        ended += [(total / count**penalty, tokens) for (total, tokens), ends_ in zip(every[:width], closed) if ends_]
        ended = sorted(ended, key=lambda each: -each[0])[:width]
        beams = [each for each, ends_ in zip(every, closed) if not ends_][:width]
        if not beams or (len(ended) == width and beams[0][0] / count**penalty <= ended[-1][0]):
            return ended
    raise AssertionError


@pytest.mark.parametrize(("gates", "penalty"), [(None, 1.0), ({}, -1.5), ({"action": "drop", "delay": 4}, 0.0)])
def test_beams_are_those_of_transformers(gates, penalty, make_stock, make_compressed, make_prompts):
    model, (prompt,) = make_stock() if gates is None else make_compressed(gates=gates), make_prompts(40)
    ends = tuple(range(0, 83, 6))
    for width, stops in ((1, ends), (4, ends), (3, ())):
        theirs = model.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=10,
            do_sample=False,
            length_penalty=penalty,
            eos_token_id=list(stops) or None,
            pad_token_id=0,
        )
        params = SamplingParams(max_new_tokens=10, beam_width=width, length_penalty=penalty, stop_token_ids=stops)
        (best,) = Engine(model).generate([prompt], params)
        for ours, expected in zip([best, *best.alternatives], theirs[:, 40:].tolist(), strict=True):
            assert [*ours.token_ids, *[0] * (10 - len(ours.token_ids))][: len(expected)] == expected
            assert ours.finish_reason == ("stop" if ours.token_ids[-1] in stops else "length")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:window=", "ignore:sinks=")
def test_beams_equal_a_naive_loop_wherever_there_is_room_for_them(method, make_stock, make_compressed, make_prompts):
    model, policy = build(method, make_stock, make_compressed)
    prompts, ends, alone = make_prompts(50, 19), (7, 11, 60, 61), Engine(model, policy=policy)
    params = SamplingParams(max_new_tokens=4, beam_width=3, stop_token_ids=ends, length_penalty=0.6)

    def next_logprobs(tokens):
        return alone.score(prompts[:1], [[*tokens, 0]])[0][-1].tolist()

    expected = beam_search(next_logprobs, 3, 4, ends, 0.6)
    stats = [each.stats for each in alone.score_with_stats(prompts[:1] * 3, [tokens for _, tokens in expected])]
    greedy = SamplingParams(max_new_tokens=9, temperature=0)
    beside, layout = alone.generate(prompts[1:], greedy)[0].token_ids, alone.cache.layout
    tight = {"memory": 6 * layout.num_layers * layout.num_kv_heads * layout.block_bytes(16), "max_batch_size": 4}
    preempted = 0
    for options in ({}, {"max_batch_size": 2}, tight, {"prefix_cache": True}, {"prefix_cache": True, **tight}):
        if policy is not None and "prefix_cache" in options:
            continue
        engine = Engine(model, policy=policy, **options)
        other = engine.submit(prompts[1], greedy)
        (best,) = engine.generate(prompts[:1], params)
        for ours, (score, tokens), own in zip([best, *best.alternatives], expected, stats, strict=True):
            assert ours.token_ids == tokens
            assert math.fsum(ours.logprobs) / len(tokens) ** 0.6 == pytest.approx(score, abs=CLOSE)
            assert torch.equal(ours.stats.slots, own.slots) and ours.stats.tokens_seen == own.tokens_seen
            torch.testing.assert_close(ours.stats.mean_slots, own.mean_slots)
            preempted += ours.stats.num_preemptions
        engine.run([other])
        assert other.generation.token_ids == beside and engine.blocks_in_use == 0
        engine.clear_prefix_cache()
        assert engine.cache.allocator.num_in_use == 0 and not engine.cache.allocator.extra.any()
    assert preempted > 0


@pytest.mark.parametrize("gates", [None, {}, {"action": "drop", "delay": 4}], ids=str)
def test_what_beams_share_is_computed_and_held_once(gates, make_stock, make_compressed, make_prompts):
    engine = Engine(make_stock() if gates is None else make_compressed(gates=gates), prefix_cache=True)
    params, (prompt,) = SamplingParams(max_new_tokens=18, beam_width=8, top_logprobs=2), make_prompts(400)
    request, fed = engine.submit(prompt, params), count_fed(engine)
    events = engine.step()
    assert len(request.branches) == 8
    while request.generation is None:
        held = -(-engine.cache.lengths // 16)
        beams = [each.sequence.row for each in request.branches]
        assert int(held.sum()) == int(held[:, beams].sum())  # pruned ones hold nothing
        assert engine.blocks_in_use <= int(held.amax(1).sum()) + 7 * 4 * 3
        events += engine.step()
    assert sum(fed) == 400 + 8 * 17 and engine.blocks_in_use == 0
    every = [request.generation, *request.generation.alternatives]
    assert [[event.token_id for event in events if event.number == i] for i in range(8)] == [
        each.token_ids for each in every
    ]
    for each in every:
        for logprob, top in zip(each.logprobs, each.top_logprobs, strict=True):
            assert len(top) == 2 and max(top.values()) >= logprob
    for _ in range(2):  # gates first part there
        fed.clear()
        engine.generate([prompt], params)
    assert sum(fed) <= 8 * 17 + 16


def test_beams_are_taken_off_and_fail_together(make_stock, make_prompts):
    model, prompts = make_stock(), make_prompts(30, 20)
    engine, params = Engine(model, max_batch_size=3), SamplingParams(max_new_tokens=9, beam_width=4)
    (expected,) = engine.generate(prompts[:1], params)
    assert [event.token_id for event in engine.stream(prompts[0], params) if not event.number] == expected.token_ids
    early, request = engine.submit(prompts[0], params), engine.submit(prompts[0], params)
    engine.abort(early)
    assert early.generation.token_ids == [] and early.generation.alternatives == []
    while len(request.logprobs) < 3:
        assert engine.step() == []
    engine.abort(request)
    every = [request.generation, *request.generation.alternatives]
    assert [each.finish_reason for each in every] == ["abort"] * 4 and {len(each.token_ids) for each in every} == {3}
    assert engine.blocks_in_use == 0
    request, other = engine.submit(prompts[0], params), engine.submit(prompts[1], SamplingParams(temperature=0))
    while len(request.logprobs) < 3:
        engine.step()
    forward = engine._runner.forward

    def broken(chunks, sampling=None):
        logits = forward(chunks, sampling)
        for index, chunk in enumerate(chunks):
            if chunk.sequence in [each.sequence for each in request.branches[1:]]:
                logits[index] = torch.nan
        return logits

    engine._runner.forward = broken
    with pytest.raises(ArithmeticError, match="logits are not finite"):
        engine.run([request])
    engine.run([other])
    assert other.generation.finish_reason == "length" and request.generation.finish_reason == "error"
    assert engine.blocks_in_use == 0


@pytest.mark.parametrize("changes", [{"n": 2}, {"top_k": 3}, {"seed": 1}, {"stop": ("a",)}, {"min_p": 0.1}], ids=str)
def test_what_a_search_does_not_heed_is_refused(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=f"{name}=.* beside beam_width=4: beam search ranks"):
        SamplingParams(beam_width=4, **changes)


def test_a_search_that_cannot_be_is_refused(make_stock, make_prompts):
    engine, (prompt,) = Engine(make_stock()), make_prompts(9)
    with pytest.raises(ValueError, match="beam_width=80: the model knows 83 tokens, 4 of which end"):
        engine.generate([prompt], SamplingParams(beam_width=80, stop_token_ids=(1, 2, 3, 4), ignore_eos=True))
    with engine.session() as session, pytest.raises(ValueError, match=r"beam_width=1: a session goes on from one"):
        session.generate(prompt, SamplingParams(beam_width=1))
    for wrong in (0, 1.5, "4", True):
        with pytest.raises(ValueError, match=r"beam_width=.*: expected a whole number"):
            SamplingParams(beam_width=wrong)
