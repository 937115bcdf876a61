"""A context is read once: each question to it is answered as by an engine of its own, whatever the method."""

import dataclasses

import pytest
import torch
from runtime.test_forks import KINDS
from runtime.test_laws import METHODS, layers_of, of
from runtime.test_prefix_cache import count_fed

from dmc import Engine, SamplingParams, policies
from dmc.budget import Budget
from dmc.results.compare import SKETCH, _sketch
from dmc.results.tasks import Sample
from dmc.results.tasks.base import batches
from dmc.results.tasks.forking import answers_of

GREEDY = SamplingParams(max_new_tokens=4, temperature=0.0)
CLOSE = 1e-4  # float32 sums in another order, as in the engine's own laws


def asked(make_prompts):
    """Return five questions about two contexts and one about a third, those of a context apart from each other."""
    first, second, third, *others = make_prompts(50, 41, 12, 5, 3, 6, 4, 2, 7)
    contexts = (first, second, first, third, first, second)
    pairs = zip(contexts, others, strict=True)
    return [Sample(context, [7, 1, 4][: 1 + index % 3], after=after) for index, (context, after) in enumerate(pairs)]


def alone(model, policy, sample):
    """Answer one sample with an engine that has seen nothing else."""
    engine = Engine(model, policy=policy, max_batch_size=1)
    (generation,) = engine.generate([sample.prompt], GREEDY, after=[sample.after])
    (scoring,) = engine.score_with_stats([sample.prompt], [sample.continuation], after=[sample.after])
    return generation, scoring.logprobs[range(len(sample.continuation)), sample.continuation]


@pytest.mark.parametrize(
    "method", [kind if kind in KINDS else pytest.param(kind, marks=pytest.mark.slow) for kind in METHODS]
)
@pytest.mark.filterwarnings("ignore:window=", "ignore:sinks=")
def test_answers_from_a_context_read_once_are_those_that_each_gets_alone(
    method, make_stock, make_compressed, make_prompts
):
    (gates, policy), layers = of(method), layers_of(method)
    model = make_stock(num_layers=layers) if gates is None else make_compressed(gates=gates, num_layers=layers)
    samples = asked(make_prompts)
    given = alone(model, policy, samples[2])[0].token_ids[:3]  # what the model says itself is not scored again
    samples[2] = dataclasses.replace(samples[2], continuation=given)
    expected = [alone(model, policy, sample) for sample in samples]
    near = 2e-3 if policy is not None and policy.offloaded(layers) else 1e-9  # tables of the host's pool grow with it
    for size in (8, 2):  # not all questions to a context have a place
        engine = Engine(model, policy=policy, max_batch_size=size)
        fed = count_fed(engine)
        for (ours, logprobs), (theirs, their_logprobs) in zip(
            answers_of(engine, samples, GREEDY), expected, strict=True
        ):
            assert ours.token_ids == theirs.token_ids
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=CLOSE)
            torch.testing.assert_close(logprobs, their_logprobs, atol=CLOSE, rtol=0)
            assert torch.equal(ours.stats.slots, theirs.stats.slots)
            torch.testing.assert_close(ours.stats.mean_slots, theirs.stats.mean_slots)
            for name in ("tokens_seen", "bytes_allocated", "mean_bytes_allocated", "peak_bytes_allocated"):
                assert getattr(ours.stats, name) == pytest.approx(getattr(theirs.stats, name), rel=near), name
        assert engine.blocks_in_use == 0 and not engine.cache.allocator.extra.any()
        if policy is None or policy.can_fork:
            answers = [
                (sample, generation.token_ids) for sample, (generation, _) in zip(samples, expected, strict=True)
            ]
            wrong = [one for one, tokens in answers if tokens[: len(one.continuation)] != one.continuation]
            asked_for = sum(len(sample.after) + GREEDY.max_new_tokens - 1 for sample in samples)
            scored = sum(len(sample.after) + len(sample.continuation) - 1 for sample in wrong)
            assert samples[2] not in wrong and sum(fed) == 50 + 41 + 12 + asked_for + scored


def test_a_memory_without_room_for_copies_answers_as_well(make_stock, make_prompts):
    model, samples = make_stock(), asked(make_prompts)
    expected = answers_of(Engine(model), samples, GREEDY)
    layout, policy = Engine(model).cache, policies.H2O(budget=Budget(ratio=2))
    one = layout.layout.most_blocks(60, 16) * layout.block_bytes
    for count, given in ((1.1, None), (3, None), (2.5, policy)):
        engine = Engine(model, policy=given, memory=int(count * one))
        theirs = expected if given is None else answers_of(Engine(model, policy=given), samples, GREEDY)
        for (ours, logprobs), (other, their_logprobs) in zip(answers_of(engine, samples, GREEDY), theirs, strict=True):
            assert ours.token_ids == other.token_ids
            torch.testing.assert_close(logprobs, their_logprobs, atol=CLOSE, rtol=0)
        assert engine.blocks_in_use == 0


def test_batches_hold_whole_contexts(make_prompts):
    samples = asked(make_prompts)
    assert [*batches(samples, 8)] == [[0, 2, 4, 1, 5, 3]]
    assert [*batches(samples, 4)] == [[0, 2, 4], [1, 5, 3]]
    assert [*batches(samples, 1)] == [[0, 2, 4], [1, 5], [3]]  # more questions than places: a batch of its own


def test_a_sketch_has_contexts_from_all_over_a_task_with_all_their_questions():
    samples = [Sample([number], [1], after=[question]) for question in (1, 2) for number in range(9)]
    assert SKETCH == 4
    assert [(one.prompt[0], one.after[0]) for one in _sketch(samples)] == [
        (number, question) for number in (0, 3, 5, 8) for question in (1, 2)
    ]
