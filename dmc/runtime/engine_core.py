"""The life of a request: add, schedule, forward, sample, then fork, finish or fail."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Collection, Mapping
from types import MappingProxyType

from torch import Tensor

from dmc.runtime.allocator import OutOfBlocksError
from dmc.runtime.decode_steps import POSITION, SETTINGS, SITS_OUT, DecodeBatch
from dmc.runtime.generation import FinishReason, GenerationStats
from dmc.runtime.request import Base, Request, Sequence, TokenEvent
from dmc.runtime.runner import LaunchedStep, Runner
from dmc.runtime.sampling import Distributions, Sampling, TokenCounts, distributions, new_generator
from dmc.runtime.scheduler import ScheduledChunk, Scheduler
from dmc.runtime.tally import ScoredPositions

logger = logging.getLogger(__name__)


class EngineCore:
    """Requests on their way; each continuation of a request has a sequence of its own.

    Args:
        scheduler: chooses the tokens of each pass, and gives sequences their rows in the cache.
        runner: the model and its cache.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler, self.runner, self.cache = scheduler, runner, runner.cache
        self._vocab_size = runner.model.get_input_embeddings().num_embeddings
        self._counts: TokenCounts | None = None
        self._launched: LaunchedStep | None = None
        self._settled: list[TokenEvent] = []
        self.by_sequence: dict[Sequence, Request] = {}
        """The continuation of each sequence."""
        self._suspects: deque[dict[Sequence, int]] = deque()
        """Of each request of a pass that has failed its sequences, and how many tokens of each were to be cached."""

    def __contains__(self, request: Request) -> bool:
        """Whether a continuation of the request has not ended."""
        return bool(self._unfinished(request))

    def check_is_idle(self, sequence: Sequence) -> None:
        """Raise ValueError if a request has not finished with a sequence."""
        if sequence in self.by_sequence:
            raise ValueError("the session's last turn has not finished: run it to its end, or abort it")

    def add(self, request: Request) -> None:
        """Append a request's prompt to its sequence, and queue it."""
        request.begin()
        self.by_sequence[request.sequence] = request
        self.scheduler.submit(request.sequence)

    def step(self) -> list[TokenEvent]:
        """Run one pass; see `Engine.step`."""
        try:
            return self.take_settled() + self._pass()
        except BaseException:
            self._launched = None
            self._suspects.clear()
            self.scheduler.reset()
            self.abort([*self.by_sequence.values()])
            raise

    def take_settled(self) -> list[TokenEvent]:
        """Take the events of a step that was read between two calls of `step`."""
        events, self._settled = self._settled, []
        return events

    def _pass(self) -> list[TokenEvent]:
        """Run a pass that has been launched or that the scheduler chooses; see `_fail_pass` for one that fails."""
        launched, self._launched = self._launched, None
        chunks = self._next_chunks() if launched is None else []
        sequences = [chunk.sequence for chunk in chunks] if launched is None else launched.batch.sequences
        if not sequences:
            return []
        counts = [len(chunk.tokens) for chunk in chunks] or [1] * len(sequences)
        ends = {one: one.num_computed_tokens + count for one, count in zip(sequences, counts, strict=True)}
        try:
            if launched is None:
                requests = [self.by_sequence[sequence] for sequence in sequences]
                if not (self.runner.is_recorded(chunks) and all(map(_needs_logits_alone, requests))):
                    return self._forward(chunks, requests)
                launched = self.runner.launch(DecodeBatch.of(requests, self._vocab_size))
            self._launched = self._launch_following(launched)
            return self._land(launched)
        except Exception as error:
            logger.warning("a pass of %d requests has failed", len(sequences), exc_info=True)
            self._fail_pass(ends, error)
            return []

    def _next_chunks(self) -> list[ScheduledChunk]:
        self.scheduler.alone = self._next_suspects()
        chunks = self.scheduler.next_chunks()
        if (outgrown := self.scheduler.outgrown) is not None:
            self.scheduler.outgrown = None
            self._fail(self.by_sequence[outgrown], self._out_of_blocks(outgrown), cache_is_valid=True)
        return chunks

    def _launch_following(self, launched: LaunchedStep) -> LaunchedStep | None:
        """Launch the step after one that has not been read, if no token of that could change what comes next.

        The device then computes while the host reads. A request that turns out to have ended sits out.
        """
        batch = launched.batch
        if not (launched.goes_on and batch.ends_on_device and self.scheduler.only_decodes(batch.sequences)):
            return None
        if (following := batch.following()) is None:
            return None
        fits = self.cache.surely_fits(following.rows, int(following.inputs[POSITION].max()) + 1)
        return self.runner.launch(following) if fits else None

    def settle(self) -> None:
        """Read a step that has been launched ahead, whose events come later: host and cache then know the same."""
        if (launched := self._launched) is None:
            return
        self._launched = None
        try:
            self._settled += self._land(launched)
        except Exception as error:
            self._fail_pass({one: one.num_computed_tokens + 1 for one in launched.batch.sequences}, error)

    def _land(self, launched: LaunchedStep) -> list[TokenEvent]:
        """Wait for a launched step and append its tokens."""
        *rows, (num_free, *_) = launched.copy.on_host().tolist()
        ahead = self._launched
        if self.cache.layout.ranks.size == 1 and launched.num_counted == self.cache.free.num_counted:
            self.cache.free.note(int(num_free), None if ahead is None else ahead.batch.rows)
        requests, log_probs = launched.batch.requests, launched.log_probs
        rows = rows[: len(requests)]
        here = [index for index, (token, *_) in enumerate(rows) if token != SITS_OUT]
        if len(here) < len(requests):
            requests, rows = [requests[index] for index in here], [rows[index] for index in here]
            log_probs = None if log_probs is None else log_probs[here]
        if not requests:
            return []
        self.runner.book(requests)
        found = None if log_probs is None else Distributions(log_probs, log_probs)
        if found is not None and ahead is not None and any(token < 0 for token, *_ in rows):
            ahead.goes_on = False  # those whose tokens are open sit out
        sampling = Sampling(launched.batch.inputs[SETTINGS, here], *launched.batch.mode)
        events = self._accept(requests, self._closed(rows, sampling, found), found)
        if ahead is not None and all(request.outcome is not None for request in ahead.batch.requests):
            self._launched = None
        return events

    def _forward(self, chunks: list[ScheduledChunk], requests: list[Request]) -> list[TokenEvent]:
        """Feed chunks to the model, and hand each request its logits.

        Raises:
            Exception: what the model, or a custom policy, raises. Some of the cache may have been written.
        """
        logits = self.runner.forward(chunks)
        to_sample: list[Request] = []
        rows: list[int] = []
        begin = 0
        for chunk, request in zip(chunks, requests, strict=True):
            end = begin + chunk.num_logits
            if request.forced.is_waiting:
                begin += request.take(logits[begin:end])
            if begin < end:
                to_sample += [request] if request.logprobs else self._fork(request)
                rows += [begin] * (len(to_sample) - len(rows))
            elif not chunk.sequence.num_waiting:  # a given continuation has been scored, or a prompt computed
                self._finish(request, "length", cache_is_valid=request.forced.is_finite)
            begin = end
        if not to_sample:
            return []
        return self._sample(to_sample, logits if rows == list(range(len(logits))) else logits[rows])

    def _fork(self, request: Request) -> list[Request]:
        """Return all continuations whose first token comes next, at the end of their prompt."""
        if request.root is None and len(request.branches) < request.params.n:
            for sequence in self.copies(request.sequence, request.params.n - 1):
                generator = new_generator(request.params, self.cache.layout.ranks, len(request.branches))
                branch = self.by_sequence[sequence] = request.branch(sequence, generator)
                if sequence.row is None:
                    branch.stats_before = self.stats(request)
        return [branch for branch in request.branches if not branch.logprobs]

    def copies(self, sequence: Sequence, count: int) -> list[Sequence]:
        """Fork a sequence; a copy for which there is no room shares nothing, and is computed again."""
        copies = [sequence.copy() for _ in range(count)]
        if sequence.row is not None:
            for copy in copies:
                self.cache.tally.close_row(sequence.row, copy.held)
            try:
                self.scheduler.fork(sequence, copies)
            except BaseException:  # of a pool that cannot grow: nobody would ever end what was copied
                for copy in copies:
                    self.scheduler.forget(copy)
                raise
        return copies

    def freeze(self, sequence: Sequence) -> Base:
        """Let go of a resting sequence's row but not of its blocks, from which others go on.

        Raises:
            ValueError: see `Scheduler.why_not_shared`.
        """
        self.settle()
        if (reason := self.scheduler.why_not_shared(sequence)) is not None:
            raise ValueError(reason)
        assert sequence.row is not None
        self.cache.tally.close_row(sequence.row, sequence.held)
        base = Base(self.cache.snapshot(sequence.row, moves=True))
        sequence.row, sequence.num_computed_tokens = None, 0
        self.scheduler.resting.remove(sequence)
        self.scheduler.bases.append(base)
        return base

    def drop(self, base: Base) -> None:
        """Free what a frozen sequence holds; those that go on from it and have no row are computed again."""
        if base.snapshot is not None:
            self.settle()
            self.cache.drop(base.snapshot)
            self.scheduler.bases.remove(base)
            base.snapshot = None

    def _sample(self, requests: list[Request], logits: Tensor) -> list[TokenEvent]:
        self._counts = self._counts or TokenCounts(logits.shape[-1], logits.device)
        histories = [request.history for request in requests]
        found, errors = distributions(logits, [request.params for request in requests], histories, self._counts)
        uniforms = [request.uniform() for request in requests]
        sampling = Sampling.of([request.params for request in requests], uniforms, self._vocab_size)
        # ranks may have summed in another order, and different tokens would part them for good
        ranks = self.cache.layout.ranks
        *rows, (num_free, *_) = ranks.broadcast(self.runner.packed(found.choose(sampling))).tolist()
        if ranks.size == 1:
            self.cache.free.note(int(num_free))
        return self._accept(requests, self._closed(rows, sampling, found), found, errors)

    def _closed(self, rows: list[list[float]], sampling: Sampling, found: Distributions | None) -> list[list[float]]:
        """Choose the tokens that are left open, of flat distributions, and read them too."""
        if found is not None and (left := [index for index, (token, *_) in enumerate(rows) if token < 0]):
            again = self.runner.packed(found.choose_among_all(left, sampling))
            for index, row in zip(left, self.cache.layout.ranks.broadcast(again).tolist(), strict=False):
                rows[index] = row
        return rows

    def _accept(
        self,
        requests: list[Request],
        rows: list[list[float]],
        found: Distributions | None,
        errors: Mapping[int, Exception] = MappingProxyType({}),
    ) -> list[TokenEvent]:
        """Append the tokens of a step.

        Args:
            requests: the requests that were sampled for.
            rows: see `Choice.as_rows`.
            found: what they were chosen from; None: it is not needed any more.
            errors: of the requests that have failed already.
        """
        events: list[TokenEvent] = []
        for index, (request, (token, logprob, *top)) in enumerate(zip(requests, rows, strict=True)):
            if index in errors or not math.isfinite(logprob):
                # finite logits: a processor or a penalty is at fault, and not the model
                is_valid = found is not None and bool(found.log_probs[index].isfinite().any())
                self._fail(request, errors.get(index) or _not_finite(request), is_valid)
                continue
            num_top = 2 * request.params.top_logprobs
            likely = dict(zip(map(int, top[:num_top:2]), top[1:num_top:2], strict=True)) if num_top else {}
            try:
                event = request.accept(int(token), logprob, likely)
            except Exception as error:  # of its tokenizer
                self._fail(request, error, cache_is_valid=True)
                continue
            events.append(event)
            if event.finish_reason is not None:
                self._finish(request, event.finish_reason)
        return events

    def _finish(self, request: Request, reason: FinishReason, cache_is_valid: bool = True) -> None:
        """End a continuation and free its blocks, which the prefix cache takes over only if they are valid."""
        sequence = request.sequence
        request.finish(reason, self.stats(request))
        if self._counts is not None and request.history is not None:
            self._counts.close(request.history)
        self.by_sequence.pop(sequence, None)
        self.scheduler.finish(sequence, cache_is_valid)
        if not sequence.num_waiting:  # nothing was generated, or is left to feed: the prompt has ended
            sequence.next_prompt = len(sequence.tokens)
        sequence.num_preemptions, sequence.held = 0, ScoredPositions()
        if sequence.row is not None:
            self.cache.tally.open_row(sequence.row, sequence.held)

    def stats(self, request: Request) -> GenerationStats:
        """Measure the memory of a request's sequence, or return what it had when it last had any."""
        sequence = request.sequence
        if sequence.row is None and request.stats_before is not None:
            return request.stats_before
        return GenerationStats.of(self.cache, sequence.row, sequence.held, sequence.num_preemptions)

    def _fail(self, request: Request, error: Exception, cache_is_valid: bool = False) -> None:
        """End a continuation that cannot go on."""
        (request.root or request).error = error
        self._finish(request, "error", cache_is_valid)

    def _fail_pass(self, ends: dict[Sequence, int], error: Exception) -> None:
        """End the request of a pass that has failed; of several, each is computed again alone, to see which fails.

        Args:
            ends: the pass's sequences, and how many tokens of each were to be cached behind it.
            error: what the pass has raised.
        """
        self._launched = None
        sequences = [*ends]
        self.scheduler.recover(sequences)
        by_root: dict[Request, dict[Sequence, int]] = {}
        for sequence in sequences:
            if (request := self.by_sequence.get(sequence)) is not None:
                by_root.setdefault(request.root or request, {})[sequence] = ends[sequence]
        if len(by_root) > 1:
            self.scheduler.again([sequence for suspects in by_root.values() for sequence in suspects])
            self._suspects.extend(by_root.values())
            return
        for root in by_root:
            for branch in self._unfinished(root):
                self._fail(branch, error)

    def _next_suspects(self) -> Collection[Sequence]:
        """Return the sequences of the next request that has to come through alone; none: all have."""
        while self._suspects:
            suspects = [sequence for sequence in self._suspects[0] if sequence in self.by_sequence]
            if any(sequence.num_computed_tokens < self._suspects[0][sequence] for sequence in suspects):
                return suspects
            self._suspects.popleft()
            for sequence in [*self.scheduler.running]:
                self.scheduler.pause(sequence)
        return ()

    def _out_of_blocks(self, sequence: Sequence) -> OutOfBlocksError:
        cache = self.cache
        return OutOfBlocksError(
            f"a sequence of {len(sequence.tokens)} tokens has outgrown the {cache.allocator.num_blocks} blocks that "
            f"memory= holds: it holds {cache.slots(sequence.row or 0).double().mean():.0f} entries per head after "
            f"{sequence.num_computed_tokens}; give more memory, or shorten it"
        )

    def abort(self, requests: Collection[Request]) -> None:
        """End what has not ended of requests; their tokens so far become their generations."""
        if any(map(self._unfinished, requests)):
            self.settle()
        for branch in [branch for request in requests for branch in self._unfinished(request)]:
            self._finish(branch, "abort")

    def close(self, sequence: Sequence) -> None:
        """Abort a session's request, if it has one, and free the blocks of its sequence."""
        if sequence in self.by_sequence:
            self.settle()
        if (request := self.by_sequence.get(sequence)) is not None:
            self._finish(request, "abort")
        self.scheduler.finish(sequence)

    def _unfinished(self, request: Request) -> list[Request]:
        return [branch for branch in request.branches if self.by_sequence.get(branch.sequence) is branch]


def _needs_logits_alone(request: Request) -> bool:
    """Whether the logits alone decide a request's next token, in a step that only decodes."""
    return bool(request.logprobs) and not request.params.changes_logits


def _not_finite(request: Request) -> ArithmeticError:
    tokens = request.prompt
    shown = ", ".join(map(str, tokens[:8])) + (", ..." if len(tokens) > 8 else "")
    return ArithmeticError(
        f"the model's logits are not finite after a prompt of {len(tokens)} tokens [{shown}] and "
        f"{len(request.logprobs)} generated ones: expected numbers; look for weights that are not, a dtype that "
        "overflows, or a logits_processor that leaves no token"
    )
