import pytest
import torch

from dmc import SamplingParams
from dmc.kernels.reference import take_blocks
from dmc.runtime.paged_cache import CacheLayout, PagedCache
from dmc.runtime.scheduler import Scheduler, Segment
from dmc.runtime.sequence import Sequence

HEADS = 2  # of one layer: a block each for every 16 tokens


def make(num_blocks: int | None = None, rows: int = 3, chunk: int | None = None) -> Scheduler:
    layout = CacheLayout(1, HEADS, 4, torch.float32, torch.device("cpu"))
    return Scheduler(PagedCache(layout, rows, 16, num_blocks), chunk)


def submit(scheduler: Scheduler, *lengths: int) -> list[Sequence]:
    sequences = [Sequence(list(range(length)), SamplingParams()) for length in lengths]
    for sequence in sequences:
        scheduler.submit(sequence)
    return sequences


def feed(scheduler: Scheduler, segments: list[Segment]) -> None:
    """Do what the engine does, every token appended, one token generated where nothing waits."""
    cache = scheduler.cache
    rows = [segment.sequence.row for segment in segments]
    counts = [len(segment.tokens) for segment in segments]
    cache.reserve(rows, counts)  # type: ignore[arg-type]
    for row, count, segment in zip(rows, counts, segments, strict=True):
        assert row is not None
        take_blocks(cache.layer(0), torch.tensor([row]), cache.lengths[0, row][None] + count)
        cache.tokens_seen[row] += count
        segment.sequence.num_fed += count
        if not segment.sequence.num_waiting:
            segment.sequence.generated.append(0)


def sizes(segments: list[Segment]) -> list[int]:
    return [len(segment.tokens) for segment in segments]


def test_whole_prompts_then_one_token_each() -> None:
    scheduler = make()
    submit(scheduler, 5, 40)
    segments = scheduler.next_segments()
    assert sizes(segments) == [5, 40]
    feed(scheduler, segments)
    assert sizes(scheduler.next_segments()) == [1, 1]


def test_prompts_are_cut_in_chunks_beside_decoding_ones() -> None:
    scheduler = make(chunk=16)
    submit(scheduler, 5, 40)
    seen = []
    for _ in range(4):
        segments = scheduler.next_segments()
        seen.append(sizes(segments))
        feed(scheduler, segments)
    assert seen == [[5, 16], [1, 16], [1, 8], [1, 1]]


def test_sequences_wait_for_rows_in_their_order() -> None:
    scheduler = make(rows=2)
    sequences = submit(scheduler, 3, 4, 5)
    segments = scheduler.next_segments()
    assert [segment.sequence for segment in segments] == sequences[:2]
    feed(scheduler, segments)
    scheduler.finish(sequences[0])
    segments = scheduler.next_segments()
    assert [segment.sequence for segment in segments] == sequences[1:]
    assert sizes(segments) == [1, 5]


def test_nobody_overtakes_a_sequence_that_waits_for_blocks() -> None:
    scheduler = make(num_blocks=4)
    first, long, short = submit(scheduler, 16, 32, 3)
    segments = scheduler.next_segments()
    assert [segment.sequence for segment in segments] == [first]
    assert list(scheduler.waiting) == [long, short]


def test_youngest_gives_way_and_comes_back_with_what_it_has_generated() -> None:
    scheduler = make(num_blocks=4)
    old, young = submit(scheduler, 16, 15)
    segments = scheduler.next_segments()
    assert sizes(segments) == [16, 15]
    feed(scheduler, segments)
    segments = scheduler.next_segments()  # the old one needs two more blocks
    assert [segment.sequence for segment in segments] == [old]
    assert (young.num_preemptions, young.num_fed, young.row) == (1, 0, None)
    assert scheduler.cache.allocator.num_in_use == 2
    feed(scheduler, segments)
    scheduler.finish(old)
    (segment,) = scheduler.next_segments()
    assert segment.sequence is young
    assert segment.tokens == [*range(15), 0]
    assert old.num_preemptions == 0


def test_abort_returns_every_block_and_row() -> None:
    scheduler = make(rows=2)
    submit(scheduler, 20, 30, 40)
    feed(scheduler, scheduler.next_segments())
    assert scheduler.cache.allocator.num_in_use > 0
    scheduler.abort_all()
    assert scheduler.cache.allocator.num_in_use == 0
    assert scheduler.cache.num_free_rows == 2
    assert scheduler.next_segments() == []


@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_blocks_never_run_out_inside_a_step(chunk: int | None) -> None:
    scheduler = make(num_blocks=8, rows=3, chunk=chunk)
    sequences = submit(scheduler, 30, 17, 40, 3, 25)
    for _ in range(500):
        segments = scheduler.next_segments()
        if not segments:
            break
        feed(scheduler, segments)  # raises OutOfBlocksError if the scheduler promised too much
        for segment in segments:
            if len(segment.sequence.generated) == 12 and segment.sequence.row is not None:
                scheduler.finish(segment.sequence)
    assert all(len(sequence.generated) == 12 for sequence in sequences)
    assert scheduler.cache.allocator.num_in_use == 0
