"""Which tokens are fed next: decoding first, then prompts; sessions that rest and the youngest give way for blocks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from dmc.policies.attention import GENERATED, Phase
from dmc.runtime.paged_cache import PagedCache
from dmc.runtime.sequence import Sequence

RESERVE = 2
"""A sequence that gave way returns when so many times the blocks are free that its known tokens will take.

So it gives way again only when new tokens have filled about as many: what is computed again stays in proportion.
"""


@dataclass(frozen=True)
class Segment:
    """The next tokens of one sequence."""

    sequence: Sequence
    tokens: list[int]
    first_wanted: int
    """Tokens before this one of the segment need no logits."""
    phase: Phase = GENERATED
    """What they are to a policy."""

    @property
    def num_wanted(self) -> int:
        """Tokens whose logits are of interest."""
        return len(self.tokens) - self.first_wanted


@dataclass(frozen=True)
class Pace:
    """How a policy wants tokens to be fed."""

    one_by_one: bool
    """Whether each generated token has a pass of its own."""
    whole_prompts: bool
    """Whether the token budget cuts no prompt, so that its layers are compressed one after the other."""


class Scheduler:
    """Continuous batching over the rows of a cache.

    A sequence is in one of the lists at every moment, so that `reset` finds it wherever a step was interrupted.

    Args:
        cache: gives rows and says whether blocks suffice.
        prefill_chunk_size: most tokens of one sequence in one step; None: all.
        token_budget: most tokens in one step; None: no limit.
        pace: what a policy asks for; None: prompts and generated tokens are fed alike.
    """

    def __init__(
        self,
        cache: PagedCache,
        prefill_chunk_size: int | None = None,
        token_budget: int | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.cache, self.prefill_chunk_size, self.token_budget = cache, prefill_chunk_size, token_budget
        self.pace = pace
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In the order in which they were submitted."""
        self.resting: list[Sequence] = []
        """Kept ones that have a row but do not run, or wait for their turn to; the longest unused first."""

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        sequence.blocks_to_return = 0
        self.waiting.append(sequence)
        if sequence in self.resting:
            self.resting.remove(sequence)
            self.resting.append(sequence)

    def next_segments(self) -> list[Segment]:
        """Choose the next step's tokens so that blocks suffice even if none is merged; admit and preempt as needed."""
        segments = self._share_out()
        preempted = False
        while not self._fits(segments):
            if self.resting:
                self._evict(self.resting[0])
            else:
                self._preempt_youngest()
                preempted = True
                segments = self._share_out()
        if not preempted:
            self._admit(segments)
        return segments

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence off; its blocks return, or rest until they are needed if it is kept."""
        if sequence in self.running:
            if sequence.kept:
                self.resting.append(sequence)
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        if not sequence.kept:
            self._release(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Take a sequence off and its blocks back, kept or not."""
        self.finish(sequence)
        self._release(sequence)
        if sequence in self.resting:
            self.resting.remove(sequence)

    def reset(self) -> None:
        """Drop everything, whatever state an interrupted step has left behind; all blocks return."""
        for sequence in (*self.waiting, *self.running, *self.resting):
            sequence.row, sequence.num_fed = None, 0
        self.waiting.clear()
        self.running.clear()
        self.resting.clear()
        self.cache.reset()

    def _share_out(self) -> list[Segment]:
        """Give running sequences their share of the budget, those with one token to feed first."""
        segments: list[Segment] = []
        for sequence in sorted(self.running, key=lambda each: each.num_waiting > 1):
            left = self._budget_left(segments)
            if left == 0:
                break
            segments.append(self._segment(sequence, left))
        return segments

    def _admit(self, segments: list[Segment]) -> None:
        while self.waiting and (left := self._budget_left(segments)) != 0:
            sequence = self.waiting[0]
            if not self._may_return(sequence):
                return
            segment = self._segment(sequence, left)
            while not self._has_room([*segments, segment]):
                others = [each for each in self.resting if each is not sequence]
                if not others:
                    return
                self._evict(others[0])
            self.running.append(sequence)
            self.waiting.popleft()
            if sequence.row is None:
                sequence.row = self.cache.open_row()
                self.cache.tally.open_row(sequence.row, sequence.held)
            else:
                self.resting.remove(sequence)
            segments.append(segment)

    def _segment(self, sequence: Sequence, left: int | None) -> Segment:
        begin, stretch, phase = sequence.num_fed, sequence.num_waiting, GENERATED
        if self.pace is not None:
            stretch, phase = sequence.stretch()
            if Phase.PROMPT in phase:
                left = None if self.pace.whole_prompts else left
            elif self.pace.one_by_one:
                stretch = 1
        count = min(limit for limit in (stretch, self.prefill_chunk_size, left) if limit is not None)
        if Phase.PROMPT in phase and count == stretch:
            phase |= Phase.LAST
        wanted = min(max(sequence.wanted - begin, 0), count)
        return Segment(sequence, sequence.tokens[begin : begin + count], wanted, phase)

    def _budget_left(self, segments: list[Segment]) -> int | None:
        if self.token_budget is None:
            return None
        return max(self.token_budget - sum(len(segment.tokens) for segment in segments), 0)

    def _has_room(self, segments: list[Segment]) -> bool:
        return (segments[-1].sequence.row is not None or self.cache.num_free_rows > 0) and self._fits(segments)

    def _fits(self, segments: list[Segment]) -> bool:
        return self.cache.fits(
            [segment.sequence.row for segment in segments], [len(segment.tokens) for segment in segments]
        )

    def _may_return(self, sequence: Sequence) -> bool:
        """Whether a sequence that gave way would not soon give way again; those who rest keep nobody out."""
        if not self.running or not sequence.blocks_to_return:
            return True
        if self.cache.has_free(sequence.blocks_to_return):
            return True
        others = [each for each in self.resting if each is not sequence]
        resting = sum(self._blocks_expected(each, each.num_fed) for each in others)
        return self.cache.has_free(sequence.blocks_to_return - resting)

    def _blocks_expected(self, sequence: Sequence, num_tokens: int) -> int:
        return 0 if sequence.row is None else self.cache.blocks_expected(sequence.row, num_tokens)

    def _preempt_youngest(self) -> None:
        assert len(self.running) > 1, "a sequence that never fits was let in"
        youngest = self.running[-1]
        self.waiting.appendleft(youngest)
        youngest.blocks_to_return = RESERVE * self._blocks_expected(youngest, len(youngest.tokens))
        self._release(youngest)
        youngest.num_preemptions += 1
        self.running.pop()

    def _evict(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.num_preemptions += 1
        self.resting.remove(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.row is not None:
            self.cache.tally.close_row(sequence.row, sequence.held)
            self.cache.close_row(sequence.row)
        sequence.row, sequence.num_fed = None, 0
