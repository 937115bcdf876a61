"""One forward pass: from scheduled chunks to the next tokens of their requests, and the news of these."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from dmc.runtime.active_requests import ActiveRequests
from dmc.runtime.request import Request, TokenEvent
from dmc.runtime.runner import Runner
from dmc.runtime.sampling import Sampling, choose_tokens
from dmc.runtime.scheduler import ScheduledChunk


class NextTokens:
    """Runs the model over chunks and gives each request what is its own of the logits.

    Args:
        runner: the model and its cache.
        active: the requests of the chunks' sequences.
        vocab_size: size of the vocabulary.
    """

    def __init__(self, runner: Runner, active: ActiveRequests, vocab_size: int) -> None:
        self._runner, self._active, self._vocab_size = runner, active, vocab_size

    def after(self, chunks: list[ScheduledChunk]) -> list[TokenEvent]:
        """Feed chunks; the tokens that come next go to their requests, which may end with them.

        Raises:
            Exception: what the model, or a custom policy, raises. Some of the cache may have been written.
        """
        requests = [self._active.by_sequence[chunk.sequence] for chunk in chunks]
        if self._runner.is_recorded(chunks) and all(map(_is_plain, requests)):
            params, uniforms = [each.params for each in requests], [each.uniform for each in requests]
            packed = self._runner.forward(chunks, Sampling.of(params, uniforms, self._vocab_size))
            return self._accept(requests, packed)
        logits = self._runner.forward(chunks)
        asking: list[Request] = []
        rows: list[int] = []
        begin = 0
        for chunk, request in zip(chunks, requests, strict=True):
            end = begin + chunk.num_logits
            begin += request.take(logits[begin:end])
            if begin < end:
                asking += [request] if request.logprobs else self._active.begin_branches(request)
                rows += [begin] * (len(asking) - len(rows))
            elif not chunk.sequence.num_waiting:
                self._active.finish(request, "length", sound=request.forced.is_finite)
            begin = end
        return self._choose(asking, logits if rows == list(range(len(logits))) else logits[rows]) if asking else []

    def _choose(self, requests: list[Request], logits: Tensor) -> list[TokenEvent]:
        params, uniforms = [each.params for each in requests], [each.uniform for each in requests]
        histories = [each.history(logits.shape[-1], logits.device) for each in requests]
        choice, errors = choose_tokens(logits, params, uniforms, histories)
        return self._accept(requests, self._runner.packed(choice), errors, logits)

    def _accept(
        self,
        requests: list[Request],
        packed: Tensor,
        errors: Mapping[int, Exception] = MappingProxyType({}),
        logits: Tensor | None = None,
    ) -> list[TokenEvent]:
        """Read what a step has brought, the one time that the host waits for it, and tell of the tokens.

        Args:
            requests: whose they are.
            packed: see `Runner.packed`; rows beyond the requests' are not read.
            errors: of the requests that have failed already.
            logits: what requests' own parameters have changed; None: they do not.
        """
        cache = self._runner.cache
        # ranks may have summed in another order, and a token of their own would part them for good
        *drawn, (num_free, *_) = cache.layout.ranks.broadcast(packed).tolist()
        if cache.layout.ranks.size == 1:
            cache.note_free(int(num_free))
        events: list[TokenEvent] = []
        for index, (request, (token, logprob, *top)) in enumerate(zip(requests, drawn, strict=False)):
            if index in errors or not math.isfinite(logprob):
                # else it is the model's fault, not the request's
                is_sound = logits is not None and bool(logits[index].amax().isfinite())
                self._active.fail(request.sequence, errors.get(index) or _not_finite(request), is_sound)
                continue
            likely = list(zip(map(int, top[::2]), top[1::2], strict=True))
            try:
                events.append(request.accept(int(token), logprob, dict(likely[: request.params.top_logprobs])))
            except Exception as error:  # of its tokenizer
                self._active.fail(request.sequence, error, sound=True)
                continue
            if (reason := events[-1].finish_reason) is not None:
                self._active.finish(request, reason)
        return events


def _is_plain(request: Request) -> bool:
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
