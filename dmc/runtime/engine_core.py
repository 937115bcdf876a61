"""The life of a request, in the order of this file: add, schedule, forward, sample, then fork, finish or fail."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from dmc.runtime.allocator import OutOfBlocksError
from dmc.runtime.generation import FinishReason, GenerationStats
from dmc.runtime.request import Request, Sequence, TokenEvent
from dmc.runtime.runner import Runner
from dmc.runtime.sampling import Distributions, Sampling, TokenCounts, distributions, new_generator
from dmc.runtime.scheduler import ScheduledChunk, Scheduler
from dmc.runtime.tally import Held

logger = logging.getLogger(__name__)


class EngineCore:
    """Requests on their way; each continuation of a request has a sequence of its own.

    Args:
        scheduler: chooses the tokens of each pass, and gives sequences their rows in the cache.
        runner: the model and its cache.
        tokenizer: decodes what has ended; None: it stays without text.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, tokenizer: Any) -> None:
        self.scheduler, self.runner, self.cache = scheduler, runner, runner.cache
        self._tokenizer = tokenizer
        self._vocab_size = runner.model.get_input_embeddings().num_embeddings
        self._counts: TokenCounts | None = None
        self.by_sequence: dict[Sequence, Request] = {}
        """The continuation of each sequence."""

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
            chunks = self.scheduler.next_chunks()
            if (outgrown := self.scheduler.outgrown) is not None:
                self.scheduler.outgrown = None
                self._fail(self.by_sequence[outgrown], self._out_of_blocks(outgrown), cache_is_valid=True)
            try:
                return self._forward(chunks) if chunks else []
            except Exception as error:
                logger.warning("a pass of %d requests has failed", len(chunks), exc_info=True)
                self._fail_pass(chunks, error)
                return []
        except BaseException:
            self.scheduler.reset()
            self.abort([*self.by_sequence.values()])
            raise

    def _forward(self, chunks: list[ScheduledChunk]) -> list[TokenEvent]:
        """Feed chunks to the model, and hand each request its logits.

        Raises:
            Exception: what the model, or a custom policy, raises. Some of the cache may have been written.
        """
        requests = [self.by_sequence[chunk.sequence] for chunk in chunks]
        if self.runner.is_recorded(chunks) and all(map(_needs_logits_alone, requests)):
            sampling = self._sampling(requests)
            log_probs, packed = self.runner.forward(chunks, sampling)
            assert packed is not None
            found = None if log_probs is None else Distributions(log_probs, log_probs)
            return self._accept(requests, packed, sampling, found)
        logits, _ = self.runner.forward(chunks)
        assert logits is not None
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
                branch = self.by_sequence[sequence] = request.branch(sequence, generator, self._tokenizer)
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

    def _sampling(self, requests: list[Request]) -> Sampling:
        uniforms = [request.uniform for request in requests]
        return Sampling.of([request.params for request in requests], uniforms, self._vocab_size)

    def _sample(self, requests: list[Request], logits: Tensor) -> list[TokenEvent]:
        self._counts = self._counts or TokenCounts(logits.shape[-1], logits.device)
        histories = [request.history for request in requests]
        found, errors = distributions(logits, [request.params for request in requests], histories, self._counts)
        sampling = self._sampling(requests)
        packed = self.runner.packed(found.choose(sampling))
        return self._accept(requests, packed, sampling, found, errors)

    def _read(self, packed: Tensor, sampling: Sampling, count: int, found: Distributions | None) -> list[list[float]]:
        """Read a step's tokens, the one time that the host waits for the device, or twice for flat distributions."""
        # ranks may have summed in another order, and different tokens would part them for good
        ranks = self.cache.layout.ranks
        *rows, (num_free, *_) = ranks.broadcast(packed).tolist()
        if ranks.size == 1:
            self.cache.note_free(int(num_free))
        if found is not None and (left := [index for index, (token, *_) in enumerate(rows[:count]) if token < 0]):
            again = self.runner.packed(found.choose_among_all(left, sampling))
            for index, row in zip(left, ranks.broadcast(again).tolist(), strict=False):
                rows[index] = row
        return rows[:count]

    def _accept(
        self,
        requests: list[Request],
        packed: Tensor,
        sampling: Sampling,
        found: Distributions | None,
        errors: Mapping[int, Exception] = MappingProxyType({}),
    ) -> list[TokenEvent]:
        """Read the step's tokens and append them.

        Args:
            requests: the requests that were sampled for.
            packed: see `Runner.packed`; rows beyond the requests' are not read.
            sampling: what they were chosen by.
            found: what they were chosen from; None: it is not needed any more.
            errors: of the requests that have failed already.
        """
        rows = self._read(packed, sampling, len(requests), found)
        events: list[TokenEvent] = []
        for index, (request, (token, logprob, *top)) in enumerate(zip(requests, rows, strict=True)):
            if index in errors or not math.isfinite(logprob):
                # finite logits: a processor or a penalty is at fault, and not the model
                is_valid = found is not None and bool(found.log_probs[index].isfinite().any())
                self._fail(request, errors.get(index) or _not_finite(request), is_valid)
                continue
            num_top = 2 * request.params.top_logprobs
            try:
                likely = dict(zip(map(int, top[:num_top:2]), top[1:num_top:2], strict=True)) if num_top else {}
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
        request.finish(reason, self.stats(request), self._tokenizer)
        if self._counts is not None and request.history is not None:
            self._counts.close(request.history)
        self.by_sequence.pop(sequence, None)
        self.scheduler.finish(sequence, cache_is_valid)
        sequence.num_preemptions, sequence.held = 0, Held()
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

    def _fail_pass(self, chunks: list[ScheduledChunk], error: Exception) -> None:
        """End the requests of a pass that has failed, with all of their continuations; others are computed again."""
        requests = [self.by_sequence[sequence] for sequence in self.scheduler.recover(chunks)]
        for root in dict.fromkeys(request.root or request for request in requests):
            for branch in self._unfinished(root):
                self._fail(branch, error)

    def _out_of_blocks(self, sequence: Sequence) -> OutOfBlocksError:
        cache = self.cache
        return OutOfBlocksError(
            f"a sequence of {len(sequence.tokens)} tokens has outgrown the {cache.allocator.num_blocks} blocks that "
            f"memory= holds: it holds {cache.slots(sequence.row or 0).double().mean():.0f} entries per head after "
            f"{sequence.num_computed_tokens}; give more memory, or shorten it"
        )

    def abort(self, requests: Collection[Request]) -> None:
        """End what has not ended of requests; their tokens so far become their generations."""
        for branch in [branch for request in requests for branch in self._unfinished(request)]:
            self._finish(branch, "abort")

    def close(self, sequence: Sequence) -> None:
        """Abort a session's request, if it has one, and free the blocks of its sequence."""
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
