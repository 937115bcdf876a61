import sys
from random import Random

import pytest
import torch

from dmc.kernels.layout import CacheLayout
from dmc.kernels.reference import take_blocks
from dmc.runtime.paged_cache import PagedCache
from dmc.runtime.request import Sequence
from dmc.runtime.scheduler import Scheduler

HEADS = 2  # of one layer: a block each for every 16 tokens


def make(num_blocks=None, rows=3, chunk=None, budget=None):
    layout = CacheLayout(1, HEADS, 4, torch.float32, torch.device("cpu"))
    return Scheduler(PagedCache(layout, rows, 16, num_blocks), chunk, budget)


def submit(scheduler, *lengths):
    sequences = [Sequence(list(range(length)), next_logit_position=length - 1) for length in lengths]
    for sequence in sequences:
        scheduler.submit(sequence)
    return sequences


def feed(scheduler, chunks):
    """Do what the engine does, every token appended, one token generated where nothing waits."""
    cache = scheduler.cache
    rows = [chunk.sequence.row for chunk in chunks]
    counts = [len(chunk.tokens) for chunk in chunks]
    cache.reserve(rows, counts)
    for row, count, chunk in zip(rows, counts, chunks, strict=True):
        assert row is not None
        take_blocks(cache.layer(0), torch.tensor([row]), cache.lengths[0, row][None] + count)
        cache.tokens_seen[row] += count
        chunk.sequence.num_computed_tokens += count
        if not chunk.sequence.num_waiting:
            chunk.sequence.tokens.append(0)
            chunk.sequence.next_logit_position += 1


def sizes(chunks):
    return [len(chunk.tokens) for chunk in chunks]


ONE_EACH = [(0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("options", "lengths", "steps"),
    [
        ({}, (5, 40), [[(0, 5), (1, 40)], ONE_EACH]),
        ({"chunk": 16}, (5, 40), [[(0, 5), (1, 16)], [(0, 1), (1, 16)], [(0, 1), (1, 8)], ONE_EACH]),
        ({"chunk": 16}, (40, 5), [[(0, 16), (1, 5)], [(1, 1), (0, 16)]]),  # an older prompt comes after who decodes
        (
            {"rows": 4, "budget": 8},
            (3, 12, 6),
            [[(0, 3), (1, 5)], [(0, 1), (1, 7)], [*ONE_EACH, (2, 6)], *[[*ONE_EACH, (2, 1)]] * 2],
        ),
        ({"rows": 3, "budget": 2}, (1, 1, 1), [ONE_EACH] * 3),  # the oldest
    ],
    ids=str,
)
def test_whole_prompts_or_chunks_share_what_decoding_leaves_of_the_budget(options, lengths, steps):
    scheduler, seen = make(**options), []
    sequences = submit(scheduler, *lengths)
    for _ in steps:
        chunks = scheduler.next_chunks()
        seen.append([(sequences.index(chunk.sequence), len(chunk.tokens)) for chunk in chunks])
        feed(scheduler, chunks)
    assert seen == steps


def test_sequences_wait_for_rows_in_their_order():
    scheduler = make(rows=2)
    sequences = submit(scheduler, 3, 4, 5)
    chunks = scheduler.next_chunks()
    assert [chunk.sequence for chunk in chunks] == sequences[:2]
    feed(scheduler, chunks)
    scheduler.finish(sequences[0])
    chunks = scheduler.next_chunks()
    assert [chunk.sequence for chunk in chunks] == sequences[1:]
    assert sizes(chunks) == [1, 5]


def test_nobody_overtakes_a_sequence_that_waits_for_blocks():
    scheduler = make(num_blocks=4)
    first, long, short = submit(scheduler, 16, 32, 3)
    chunks = scheduler.next_chunks()
    assert [chunk.sequence for chunk in chunks] == [first]
    assert list(scheduler.waiting) == [long, short]


def test_youngest_gives_way_and_comes_back_with_what_it_has_generated():
    scheduler = make(num_blocks=4)
    old, young = submit(scheduler, 16, 15)
    chunks = scheduler.next_chunks()
    assert sizes(chunks) == [16, 15]
    feed(scheduler, chunks)
    chunks = scheduler.next_chunks()  # the old one needs two more blocks
    assert [chunk.sequence for chunk in chunks] == [old]
    assert (young.num_preemptions, young.num_computed_tokens, young.row) == (1, 0, None)
    assert scheduler.cache.allocator.num_in_use == 2
    feed(scheduler, chunks)
    scheduler.finish(old)
    (chunk,) = scheduler.next_chunks()
    assert chunk.sequence is young
    assert chunk.tokens == [*range(15), 0]
    assert old.num_preemptions == 0


def test_who_gave_way_comes_back_before_those_who_came_later():
    scheduler = make(num_blocks=4)
    old, young = submit(scheduler, 16, 15)
    feed(scheduler, scheduler.next_chunks())
    (late,) = submit(scheduler, 15)
    feed(scheduler, scheduler.next_chunks())
    assert young.num_preemptions == 1 and [*scheduler.waiting] == [young, late]
    scheduler.finish(old)
    assert scheduler.next_chunks()[0].sequence is young


def test_an_interrupted_step_leaves_no_block_in_use():
    scheduler = make(rows=3)
    sequences = submit(scheduler, 20, 30, 40, 50)
    sequences[0].kept = True
    feed(scheduler, scheduler.next_chunks())
    scheduler.finish(sequences[0])
    cache = scheduler.cache
    cache.allocator.height -= 2  # blocks that a kernel took and had no time to enter in a table
    scheduler.reset()
    assert cache.allocator.num_in_use == 0
    assert sorted(cache.allocator.stack.tolist()) == list(range(cache.allocator.num_blocks))
    assert cache.num_free_rows == 3
    assert all((sequence.row, sequence.num_computed_tokens) == (None, 0) for sequence in sequences)
    assert scheduler.next_chunks() == []


def test_wherever_a_sequence_stands_it_can_be_taken_off():
    scheduler = make(rows=2)
    first, second, third = submit(scheduler, 20, 30, 40)
    feed(scheduler, scheduler.next_chunks())
    for sequence in (third, first, second):
        scheduler.finish(sequence)
        scheduler.finish(sequence)  # once more does no harm
    assert scheduler.cache.allocator.num_in_use == 0
    assert scheduler.next_chunks() == []


def test_who_gave_way_does_not_come_back_in_the_same_step():
    scheduler = make(num_blocks=8, chunk=16)
    old, young = submit(scheduler, 32, 20)
    for _ in range(2):
        feed(scheduler, scheduler.next_chunks())
    assert scheduler.cache.allocator.num_free == 0
    assert [chunk.sequence for chunk in scheduler.next_chunks()] == [old]
    assert list(scheduler.waiting) == [young]


def test_only_logits_that_are_wanted_are_asked_for():
    scheduler = make(chunk=4)
    (sequence,) = submit(scheduler, 10)
    sequence.next_logit_position = 6
    seen = []
    for _ in range(4):
        (chunk,) = scheduler.next_chunks()
        seen.append((chunk.first_logit_position, chunk.num_logits))
        feed(scheduler, [chunk])
        sequence.next_logit_position = max(6, sequence.num_computed_tokens)
    assert seen == [(4, 0), (2, 2), (0, 2), (0, 1)]


def rest(scheduler, *lengths):
    """Let kept sequences run to their end."""
    sequences = submit(scheduler, *lengths)
    for sequence in sequences:
        sequence.kept = True
    feed(scheduler, scheduler.next_chunks())
    for sequence in sequences:
        scheduler.finish(sequence)
    return sequences


def test_a_kept_sequence_goes_on_where_it_stopped():
    scheduler = make(num_blocks=8)
    (sequence,) = rest(scheduler, 20)
    assert scheduler.cache.allocator.num_in_use == 4
    assert scheduler.next_chunks() == []
    sequence.tokens += [1, 2, 3]
    scheduler.submit(sequence)
    (chunk,) = scheduler.next_chunks()
    assert chunk.tokens == [0, 1, 2, 3]
    scheduler.forget(sequence)
    assert scheduler.cache.allocator.num_in_use == 0


@pytest.mark.parametrize("lack", ["rows", "blocks"])
def test_the_longest_unused_rests_no_longer_when_others_need_its_place(lack):
    scheduler = make(rows=2) if lack == "rows" else make(num_blocks=6)
    old, recent = rest(scheduler, 16, 16)
    (sequence,) = submit(scheduler, 30)
    assert [chunk.sequence for chunk in scheduler.next_chunks()] == [sequence]
    assert (old.row, old.num_computed_tokens, old.num_preemptions) == (None, 0, 1)
    assert recent.row is not None
    assert scheduler.resting == [recent]


def test_those_who_rest_give_way_before_those_who_run():
    scheduler = make(num_blocks=6)
    first, second = submit(scheduler, 16, 15)
    second.kept = True
    feed(scheduler, scheduler.next_chunks())
    scheduler.finish(second)
    (third,) = submit(scheduler, 16)
    feed(scheduler, scheduler.next_chunks())
    assert [chunk.sequence for chunk in scheduler.next_chunks()] == [first]
    assert (first.num_preemptions, second.num_preemptions, third.num_preemptions) == (0, 1, 1)


def test_a_turn_that_waits_cannot_block_those_before_it():
    scheduler = make(num_blocks=4)
    (kept,) = rest(scheduler, 30)
    (first,) = submit(scheduler, 20)
    kept.tokens += [1]
    scheduler.submit(kept)
    assert [chunk.sequence for chunk in scheduler.next_chunks()] == [first]
    assert kept.row is None
    scheduler.finish(first)
    (chunk,) = scheduler.next_chunks()
    assert chunk.tokens == kept.tokens


LOADS = {
    "a long prompt that waits for a long answer": (1040, [(400, 500), (800, 4)]),
    "long answers": (1040, [(400, 500), (500, 400)]),
    "many that grow": (800, [(32, 100)] * 8),
    "prompts and answers of all lengths": (1000, [(10, 250), (50, 2), (400, 25), (200, 100), (10, 2), (50, 250)] * 2),
}
"""Tokens that the memory holds; each request's prompt and tokens to generate."""


def run(scheduler, requests):
    """Serve prompts and so many generated tokens each; return the tokens fed, and the preemptions."""
    fed = 0
    goal = {
        sequence: len(sequence.tokens) + new
        for sequence, (_, new) in zip(submit(scheduler, *(prompt for prompt, _ in requests)), requests, strict=True)
    }
    while chunks := scheduler.next_chunks():
        feed(scheduler, chunks)
        fed += sum(sizes(chunks))
        for chunk in chunks:
            if len(chunk.sequence.tokens) == goal[chunk.sequence]:
                scheduler.finish(chunk.sequence)
        assert fed < 100_000
    assert all(len(sequence.tokens) == length for sequence, length in goal.items())
    assert scheduler.cache.allocator.num_in_use == 0
    return fed, sum(sequence.num_preemptions for sequence in goal)


def needed(requests):
    return sum(prompt + new - 1 for prompt, new in requests)


@pytest.mark.parametrize("load", LOADS)
def test_what_is_computed_again_stays_in_proportion(load):
    num_tokens, requests = LOADS[load]
    fed, num_preemptions = run(make(num_blocks=num_tokens // 16 * HEADS, rows=32, budget=128), requests)
    # prompts are let in where there is room for those of all who run, so that only answers can outgrow it
    assert (num_preemptions == 0) == (load == "a long prompt that waits for a long answer")
    assert fed <= 2 * needed(requests)


def test_random_loads_finish_and_are_fed_at_most_twice():
    random, num_preemptions = Random(0), 0
    for _ in range(20):
        num_tokens = 16 * random.randint(4, 12)
        prompts = [random.randint(1, num_tokens // 3) for _ in range(random.randint(2, 10))]  # several run together
        requests = [(prompt, random.randint(1, num_tokens - prompt)) for prompt in prompts]
        rows, chunk, budget = random.choice([2, 4, 32]), random.choice([None, 5, 16]), random.choice([None, 4, 12, 128])
        fed, count = run(make(num_tokens // 16 * HEADS, rows, chunk, budget), requests)
        assert fed <= 2 * needed(requests)
        num_preemptions += count
    assert num_preemptions > 50


def test_who_gave_way_waits_until_it_may_grow_but_not_for_those_who_rest():
    scheduler = make(num_blocks=24, rows=4)
    (kept,) = rest(scheduler, 16)  # 2 blocks
    first, second, young = submit(scheduler, 16, 64, 79)
    feed(scheduler, scheduler.next_chunks())
    assert scheduler.running == [first, second, young]
    scheduler._preempt_youngest()
    for _ in range(5):
        assert young not in [chunk.sequence for chunk in scheduler.next_chunks()]
        feed(scheduler, scheduler.next_chunks())
    scheduler.finish(second)  # 20 blocks are free or can be: twice those of its 80 tokens
    assert [chunk.sequence for chunk in scheduler.next_chunks()] == [first, young]
    assert kept.row is not None


def test_choosing_a_step_takes_work_in_proportion_to_its_sequences():
    def calls(count):
        scheduler = make(rows=count, budget=2048, num_blocks=4 * count)
        submit(scheduler, *[4] * count)
        for _ in range(2):
            feed(scheduler, scheduler.next_chunks())
        events = []
        sys.setprofile(lambda frame, event, argument: events.append(event))
        chunks = scheduler.next_chunks()
        sys.setprofile(None)
        assert sizes(chunks) == [1] * count
        return len(events)

    assert calls(200) - calls(100) <= 1.1 * (calls(100) - calls(50)) * 2
