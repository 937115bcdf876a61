"""Chooses the tokens of each pass: decoding first, then prompts; resting sessions and the youngest are preempted."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

from dmc.kernels.batch import GENERATED, Phase
from dmc.policies import CachePolicy
from dmc.runtime.paged_cache import PagedCache
from dmc.runtime.prefix_cache import PrefixCache
from dmc.runtime.request import Base, Sequence
from dmc.runtime.snapshot import Snapshot

RESERVE = 2
"""A preempted sequence returns when this many times the blocks that its known tokens will take are free.

It is thus preempted again only after new tokens have filled about as many: recomputation stays in proportion.
"""


class ScheduledChunk(NamedTuple):
    """The next tokens of one sequence."""

    sequence: Sequence
    tokens: list[int]
    first_logit_position: int
    """Index in the chunk of the first token whose logits are needed."""
    phase: Phase = GENERATED
    """Phase of the tokens, for policies."""

    @property
    def num_logits(self) -> int:
        """Number of tokens whose logits are needed."""
        return len(self.tokens) - self.first_logit_position


class Scheduler:
    """Continuous batching over the rows of a cache.

    A sequence is in one of the lists at every moment, so that `reset` finds it after an interrupted step.

    Args:
        cache: allocates rows and checks whether blocks suffice.
        prefill_chunk_size: maximum tokens of one sequence in one step; None: all.
        token_budget: maximum tokens in one step; None: no limit.
        policy: has requirements on how tokens are fed; None: prompts and generated tokens are fed alike.
        prefixes: the prefix cache; None: no prefix is kept.
    """

    def __init__(
        self,
        cache: PagedCache,
        prefill_chunk_size: int | None = None,
        token_budget: int | None = None,
        policy: CachePolicy | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.cache, self.prefill_chunk_size, self.token_budget = cache, prefill_chunk_size, token_budget
        self.policy, self.prefixes = policy, prefixes
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """Running sequences, in the order of admission."""
        self.resting: list[Sequence] = []
        """Kept sequences with a row that do not run, or wait to run; the least recently used first."""
        self.bases: list[Base] = []
        """What frozen sequences hold; it has no row, and is not evicted."""
        self.alone: Collection[Sequence] = ()
        """Sequences that alone may enter; none: all may."""
        self.outgrown: Sequence | None = None
        """Sequence whose next token does not fit the whole memory; the caller of `next_chunks` removes it."""

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        sequence.blocks_to_return = 0
        self.waiting.append(sequence)
        if self.prefixes is not None:
            self.prefixes.note(sequence)
        if sequence in self.resting:
            self.resting.remove(sequence)
            self.resting.append(sequence)

    def next_chunks(self) -> list[ScheduledChunk]:
        """Choose the next step's tokens so that blocks suffice even if no token is merged; admit and preempt as needed.

        A sequence that has all the memory and needs more becomes `outgrown`; then no chunk is returned.
        """
        if self.prefixes is not None:
            self.prefixes.keep(self.running)
        chunks = self._share_tokens()
        preempted = False
        while not self._fits(chunks):
            if self._make_room():
                continue
            chunks = self._share_tokens(shrinks=True)
            if self._fits(chunks):
                break
            if len(self.running) == 1:
                self.outgrown = self.running[0]
                return []
            self._preempt_youngest()
            preempted = True
            chunks = self._share_tokens()
        if not preempted:
            self._admit(chunks)
        while self.prefixes is not None and self.cache.would_grow(*self._rows_and_counts(chunks)):
            if not self.prefixes.shrink():
                break
        return chunks

    def only_decodes(self, sequences: list[Sequence]) -> bool:
        """Whether nothing but a further token of each of these can come next, once they have been fed their last.

        No other may enter, and no prefix of theirs would be kept.
        """
        if sequences != self.running or (self.waiting and (self.cache.num_free_rows or self.resting)):
            return False
        if self.token_budget is not None and len(sequences) > self.token_budget:
            return False
        prefixes = self.prefixes
        return prefixes is None or not any(prefixes.is_due(one, one.num_computed_tokens + 1) for one in sequences)

    def _make_room(self, sequence: Sequence | None = None, keep: int = 0) -> bool:
        """Free blocks of idle sequences except `sequence`, or of all but the latest prefixes; False: there are none."""
        return (self.prefixes is not None and self.prefixes.reclaim(keep)) or self._evict_another(sequence)

    def why_not_shared(self, sequence: Sequence) -> str | None:
        """Return why copies of a sequence's fields and blocks are not all that it goes on from, or None."""
        if sequence.row is None or sequence.num_computed_tokens == 0:
            return "the session holds nothing, or has given its blocks to others: give it a turn first"
        if self.policy is None:
            return None
        if (reason := self.policy.why_not_copied) is not None:
            return reason
        halfway = "the session's last prompt was aborted halfway: give it another turn first"
        return halfway if sequence.is_inside_prompt else None

    def fork(self, sequence: Sequence, others: list[Sequence]) -> None:
        """Let others continue from the cache of a running or resting sequence; else they recompute it."""
        cache, waiting, rests = self.cache, deque(others), sequence in self.resting
        assert sequence.row is not None
        while self.why_not_shared(sequence) is None and waiting and cache.num_free_rows:
            if not cache.has_free(2 * cache.blocks_to_share(sequence.row)):  # for a snapshot too
                if self._make_room(sequence):
                    continue
                break
            other, snapshot = waiting.popleft(), cache.snapshot(sequence.row)
            other.row, other.num_computed_tokens = cache.open_row(snapshot), sequence.num_computed_tokens
            cache.drop(snapshot)
            cache.tally.open_row(other.row, other.held)
            (self.resting if rests else self.running).append(other)
        if rests:  # as it has been used
            self.resting.remove(sequence)
            self.resting.append(sequence)
        else:
            self.waiting.extendleft(reversed(waiting))

    def adopt(self, sequence: Sequence, num_blocks: int, open_row: Callable[[], int]) -> bool:
        """Let a sequence rest whose cache comes from elsewhere; False: there is no room, it is computed again.

        Args:
            sequence: it is on no list.
            num_blocks: blocks that its cache takes.
            open_row: fills them and returns their row.
        """
        cache, num_blocks = self.cache, self.cache.layout.ranks.all_reduce(num_blocks, "max")
        while cache.num_free_rows == 0 or not cache.has_free(num_blocks):
            if not (self._make_room(sequence) if cache.num_free_rows else self._evict_another(sequence)):
                return False
        sequence.row = open_row()
        sequence.num_computed_tokens = int(cache.tokens_seen[sequence.row])
        cache.tally.open_row(sequence.row, sequence.held)
        self.resting.append(sequence)
        return True

    def finish(self, sequence: Sequence, cache_is_valid: bool = True) -> None:
        """Remove a sequence; its blocks are freed, or if it is kept, rest until they are needed.

        Args:
            sequence: a running, waiting or other sequence.
            cache_is_valid: whether its cache is finite; else all that others could reuse of it is dropped.
        """
        if sequence.kept and sequence in self.running:
            self.resting.append(sequence)
        self._leave(sequence)
        if self.prefixes is not None and not cache_is_valid:
            self.prefixes.empty()
        if not sequence.kept:
            if self.prefixes is not None and cache_is_valid and self.prefixes.take(sequence):
                sequence.row = None
            self._release(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Remove a sequence and free its blocks, of which the prefix cache takes none."""
        self._leave(sequence)
        self._release(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence off all lists of those that run or want to."""
        for sequences in (self.running, self.waiting):
            if sequence in sequences:
                sequences.remove(sequence)

    def recover(self, failed: list[Sequence]) -> None:
        """Empty the cache after a failed pass, whose writes may be half done; sequences outside of it are recomputed.

        Args:
            failed: the sequences of the pass, which are on no list any more; `again` queues them.
        """
        others = [sequence for sequence in (*self.running, *self.waiting) if sequence not in failed]
        for sequence in (*self.running, *self.resting):
            if sequence.row is not None:
                self.cache.tally.close_row(sequence.row, sequence.held)
            sequence.num_preemptions += 1
        self.reset()
        self.waiting.extend(others)

    def again(self, failed: list[Sequence]) -> None:
        """Queue sequences of a failed pass, before all others."""
        self.waiting.extendleft(reversed(failed))

    def pause(self, sequence: Sequence) -> None:
        """Let a running sequence wait, with what it has in the cache."""
        self.running.remove(sequence)
        self.waiting.append(sequence)
        if sequence.row is not None:
            self.resting.append(sequence)

    def reset(self) -> None:
        """Drop everything, whatever state an interrupted step has left behind; all blocks are freed."""
        for sequence in (*self.waiting, *self.running, *self.resting):
            sequence.row, sequence.num_computed_tokens = None, 0
        self.waiting.clear()
        self.running.clear()
        self.resting.clear()
        for base in self.bases:
            base.snapshot = None
        self.bases.clear()
        if self.prefixes is not None:
            self.prefixes.clear()
        self.cache.reset()

    def _share_tokens(self, shrinks: bool = False) -> list[ScheduledChunk]:
        """Divide the budget among running sequences, those with one token to feed first."""
        several = [one for one in self.running if len(one.tokens) - one.num_computed_tokens > 1]
        apart = set(several)
        ones = [one for one in self.running if one not in apart] if several else self.running
        chunks: list[ScheduledChunk] = []
        if self.policy is None:  # of hundreds that decode
            chunks = [
                ScheduledChunk(one, one.tokens[-1:], int(one.next_logit_position > one.num_computed_tokens))
                for one in ones[: self.token_budget]
            ]
            ones = []
        num_tokens = len(chunks)
        for sequence in (*ones, *several):
            left = self._left_after(num_tokens)
            if left == 0:
                break
            chunk = self._chunk(sequence, left)
            chunk = self._shrunk(chunk, chunks) if shrinks else chunk
            chunks.append(chunk)
            num_tokens += len(chunk.tokens)
        return chunks

    def _admit(self, chunks: list[ScheduledChunk]) -> None:
        if not self.waiting:
            return
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        for sequence in list(itertools.islice(self.waiting, None if self.alone else len(self.cache.tokens_seen))):
            left = self._left_after(num_tokens)
            if left == 0:
                return
            if self.alone and sequence not in self.alone:
                continue
            self._prefix_of(sequence)
            if self._waits_for_others(sequence):
                continue
            if not self._may_enter(sequence) or not self._open(sequence, chunks):
                return
            while not self._fits([*chunks, chunk := self._chunk(sequence, left)]):
                if not self._make_room(sequence):
                    chunk = self._shrunk(chunk, chunks)
                    if not self._fits([*chunks, chunk]):
                        self.outgrown = None if self.running else sequence
                        return
                    break
            self.running.append(sequence)
            self.waiting.remove(sequence)
            self.resting.remove(sequence)
            chunks.append(chunk)
            num_tokens += len(chunk.tokens)

    def _open(self, sequence: Sequence, others: list[ScheduledChunk]) -> bool:
        """Give a sequence a row and, as far as there is room, its known prefix; False: there is no row.

        It rests there until it runs; dropping the prefix later does not affect it.
        """
        if sequence.row is not None:
            return True
        while self.cache.num_free_rows == 0:
            if not self._evict_another(sequence):
                return False
        prefix = self._prefix_of(sequence)
        while prefix is not None and not self._fits(others, self.cache.blocks_to_share(prefix)):
            if not (has_room := self._make_room(sequence, keep=1)) and sequence.base is not None and self.running:
                return False  # until these have ended: alone it may need more than what it goes on from
            prefix = self._prefix_of(sequence) if has_room else None
        sequence.row, sequence.num_computed_tokens = (
            self.cache.open_row(prefix),
            0 if prefix is None else prefix.tokens_seen,
        )
        sequence.num_reused = sequence.num_computed_tokens
        self.cache.tally.open_row(sequence.row, sequence.held)
        self.resting.append(sequence)
        return True

    def _prefix_of(self, sequence: Sequence) -> Snapshot | None:
        """Return the snapshot that a sequence without a row continues from, if any."""
        if sequence.row is not None:
            return None
        prefix = None if sequence.base is None else sequence.base.snapshot
        if prefix is None and self.prefixes is not None:
            prefix = self.prefixes.find(sequence)
        sequence.num_computed_tokens = 0 if prefix is None else prefix.tokens_seen
        return prefix

    def _chunk(self, sequence: Sequence, left: int | None) -> ScheduledChunk:
        stretch, phase = sequence.num_waiting, GENERATED
        if (policy := self.policy) is not None:
            stretch, phase = sequence.stretch()
            if Phase.PROMPT in phase:
                # a token budget would cut prompts anywhere; whole, their layers are compressed one after the other
                left = None if self.prefill_chunk_size is None or policy.prompt_chunk is not None else left
            elif policy.one_by_one:
                stretch = 1
        count = min(limit for limit in (stretch, self.prefill_chunk_size, left) if limit is not None)
        if self.prefixes is not None:
            count = self.prefixes.chunk(sequence, count)
        if Phase.PROMPT in phase and count == stretch:
            phase |= Phase.LAST
        return self._of(sequence, count, phase)

    def _of(self, sequence: Sequence, count: int, phase: Phase = GENERATED) -> ScheduledChunk:
        begin = sequence.num_computed_tokens
        first = min(max(sequence.next_logit_position - begin, 0), count)
        return ScheduledChunk(sequence, sequence.tokens[begin : begin + count], first, phase)

    def _shrunk(self, chunk: ScheduledChunk, others: list[ScheduledChunk]) -> ScheduledChunk:
        """Drop tokens that do not fit beside those of others; a policy's prompts stay whole."""
        if self.policy is not None or len(chunk.tokens) == 1:
            return chunk
        fitting = self.cache.tokens_that_fit(*self._rows_and_counts(others))
        return self._of(chunk.sequence, min(len(chunk.tokens), fitting))

    def _left_after(self, num_tokens: int) -> int | None:
        """What is left of the budget, which whole prompts under a policy may exceed; None: there is none."""
        return None if self.token_budget is None else max(self.token_budget - num_tokens, 0)

    def _fits(self, chunks: list[ScheduledChunk], others: int = 0) -> bool:
        return self.cache.fits(*self._rows_and_counts(chunks), others)

    def _rows_and_counts(self, chunks: list[ScheduledChunk]) -> tuple[list[int], list[int]]:
        held = [chunk for chunk in chunks if chunk.sequence.row is not None]
        return [chunk.sequence.row for chunk in held], [len(chunk.tokens) for chunk in held]  # type: ignore[misc]

    def _waits_for_others(self, sequence: Sequence) -> bool:
        """Whether its prefix is being computed; sequences that need not wait for that pass it."""
        return self.prefixes is not None and sequence.row is None and self.prefixes.waits(sequence, self.running)

    def _may_enter(self, sequence: Sequence) -> bool:
        """Whether there is room for the expected cache of a sequence, beside the expected growth of others.

        A preempted one returns when it would not soon be preempted again; resting ones keep no sequence out.
        """
        if not self.running or self.cache.grows:
            return True
        wanted = max(sequence.blocks_to_return, self.cache.blocks_for(sequence.num_waiting))
        wanted += sum(self.cache.blocks_for(other.num_waiting) for other in self.running if other.num_waiting > 1)
        if self.cache.has_free(wanted):
            return True
        rows = [other.row for other in self.resting if other is not sequence and other.row is not None]
        spare = sum(map(self.cache.blocks_held, rows))
        if self.prefixes is not None:
            spare += self.cache.layout.ranks.all_reduce(self.cache.blocks_only_in(self.prefixes), "min")
        return self.cache.has_free(wanted - spare)

    def _preempt_youngest(self) -> None:
        youngest = self.running[-1]
        self.waiting.appendleft(youngest)
        held = 0 if youngest.row is None else self.cache.blocks_held(youngest.row)
        youngest.blocks_to_return = RESERVE * held * len(youngest.tokens) // max(youngest.num_computed_tokens, 1)
        self._release(youngest)
        youngest.num_preemptions += 1
        self.running.pop()

    def _evict_another(self, sequence: Sequence | None) -> bool:
        """Evict the least recently used resting sequence except `sequence`; False: there is none."""
        for other in self.resting:
            if other is not sequence:
                other.num_preemptions += other.num_computed_tokens > 0
                self._release(other)
                return True
        return False

    def _release(self, sequence: Sequence) -> None:
        if sequence.row is not None:
            self.cache.tally.close_row(sequence.row, sequence.held)
            self.cache.close_row(sequence.row)
        if sequence in self.resting:
            self.resting.remove(sequence)
        sequence.row, sequence.num_computed_tokens = None, 0
