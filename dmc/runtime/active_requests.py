"""The requests that run or wait to: how they start, part into several continuations, fail and end."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dmc.runtime.generation import FinishReason, GenerationStats
from dmc.runtime.request import Request
from dmc.runtime.sampling import new_generator
from dmc.runtime.scheduler import Scheduler
from dmc.runtime.sequence import Sequence
from dmc.runtime.tally import Held


class ActiveRequests:
    """Requests in the engine; each continuation has a sequence of its own.

    Args:
        scheduler: gives sequences their places in the cache.
        tokenizer: decodes what has ended; None: it stays without text.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Any) -> None:
        self.scheduler, self.cache, self._tokenizer = scheduler, scheduler.cache, tokenizer
        self.by_sequence: dict[Sequence, Request] = {}
        """The continuation of each sequence."""

    def __contains__(self, request: Request) -> bool:
        """Whether a continuation of the request has not ended."""
        return any(self.by_sequence.get(each.sequence) is each for each in request.branches)

    def check_is_idle(self, sequence: Sequence) -> None:
        """Raise ValueError if a request has not finished with a sequence."""
        if sequence in self.by_sequence:
            raise ValueError("the session's last turn has not finished: run it to its end, or abort it")

    def start(self, request: Request) -> None:
        """Queue a request."""
        request.begin()
        self.by_sequence[request.sequence] = request
        self.scheduler.submit(request.sequence)

    def begin_branches(self, request: Request) -> list[Request]:
        """Return all continuations whose first token comes next, at the end of their prompt."""
        if request.root is None and len(request.branches) < request.params.n:
            for sequence in self.copies(request.sequence, request.params.n - 1):
                generator = new_generator(request.params, self.cache.layout.ranks, len(request.branches))
                other = self.by_sequence[sequence] = request.branch(sequence, generator, self._tokenizer)
                if sequence.row is None:
                    other.stats_before = self.stats(request)
        return [each for each in request.branches if not each.logprobs]

    def copies(self, sequence: Sequence, count: int) -> list[Sequence]:
        """Fork a sequence; a copy for which there is no room shares nothing, and is computed again."""
        copies = [sequence.copy() for _ in range(count)]
        if sequence.row is not None:
            for each in copies:
                self.cache.tally.close_row(sequence.row, each.held)
            try:
                self.scheduler.fork(sequence, copies)
            except BaseException:  # of a pool that cannot grow: nobody would ever end what was copied
                for each in copies:
                    self.scheduler.forget(each)
                raise
        return copies

    def stats(self, request: Request) -> GenerationStats:
        """Measure the memory of a request's sequence, or return what it had when it last had any."""
        held = request.stats_before if request.sequence.row is None else None
        return held or GenerationStats.of(request.sequence, self.cache)

    def finish(self, request: Request, reason: FinishReason, sound: bool = True) -> None:
        """End a continuation and free its blocks; `sound`: its cache is intact and may be shared."""
        sequence = request.sequence
        request.finish(reason, self.stats(request), self._tokenizer)
        self.by_sequence.pop(sequence, None)
        self.scheduler.finish(sequence, sound)
        sequence.num_preemptions, sequence.held = 0, Held()
        if sequence.row is not None:
            self.cache.tally.open_row(sequence.row, sequence.held)

    def fail(self, sequence: Sequence, error: Exception, sound: bool = False) -> None:
        """End a continuation that cannot go on; `sound`: see `finish`."""
        request = self.by_sequence[sequence]
        (request.root or request).error = error
        self.finish(request, "error", sound=sound)

    def fail_requests(self, sequences: Collection[Sequence], error: Exception) -> None:
        """End the requests of a failed pass's sequences, with all of their continuations."""
        requests = [self.by_sequence[sequence] for sequence in sequences]
        for root in {id(each.root or each): each.root or each for each in requests}.values():
            for each in root.branches:
                if self.by_sequence.get(each.sequence) is each:
                    self.fail(each.sequence, error)

    def abort(self, requests: Collection[Request]) -> None:
        """End what has not ended of requests; their tokens so far become their generations."""
        for each in [each for request in requests for each in request.branches]:
            if self.by_sequence.get(each.sequence) is each:
                self.finish(each, "abort")

    def end(self, sequence: Sequence) -> None:
        """Abort a sequence's request, if it has one, and free its blocks."""
        if (request := self.by_sequence.get(sequence)) is not None:
            self.finish(request, "abort")
        self.scheduler.finish(sequence)
