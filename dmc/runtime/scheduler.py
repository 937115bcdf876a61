"""Which tokens are fed next: running sequences first, then waiting ones; the youngest gives way when blocks run out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from dmc.runtime.paged_cache import PagedCache
from dmc.runtime.sequence import Sequence


@dataclass(frozen=True)
class Segment:
    """The next tokens of one sequence."""

    sequence: Sequence
    tokens: list[int]


class Scheduler:
    """Continuous batching over the rows of a cache.

    Args:
        cache: gives rows and says how many blocks are free.
        prefill_chunk_size: most prompt tokens of one sequence in one step; None: all.
    """

    def __init__(self, cache: PagedCache, prefill_chunk_size: int | None) -> None:
        self.cache, self.prefill_chunk_size = cache, prefill_chunk_size
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def next_segments(self) -> list[Segment]:
        """Choose the next step's tokens so that blocks suffice even if none is merged; admit and preempt as needed."""
        while True:
            segments = [self._segment(sequence) for sequence in self.running]
            if self._fits(segments):
                break
            self._preempt(self.running[-1])
        while self.waiting and self.cache.num_free_rows and len(segments) == len(self.running):
            candidate = self._segment(self.waiting[0])
            if not self._fits([*segments, candidate]):
                break
            sequence = self.waiting.popleft()
            sequence.row = self.cache.open_row()
            self.running.append(sequence)
            segments.append(candidate)
        return segments

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence off; its blocks return."""
        self.running.remove(sequence)
        assert sequence.row is not None
        self.cache.close_row(sequence.row)
        sequence.row = None

    def abort_all(self) -> None:
        """Drop everything; all blocks return."""
        self.waiting.clear()
        for sequence in list(self.running):
            self.finish(sequence)

    def _segment(self, sequence: Sequence) -> Segment:
        count = min(sequence.num_waiting, self.prefill_chunk_size or sequence.num_waiting)
        return Segment(sequence, sequence.tokens[sequence.num_fed : sequence.num_fed + count])

    def _fits(self, segments: list[Segment]) -> bool:
        return self.cache.fits(
            [segment.sequence.row for segment in segments], [len(segment.tokens) for segment in segments]
        )

    def _preempt(self, sequence: Sequence) -> None:
        self.finish(sequence)
        sequence.num_fed = 0
        sequence.num_preemptions += 1
        self.waiting.appendleft(sequence)
