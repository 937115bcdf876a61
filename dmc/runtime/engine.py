"""The engine: prompts in, continuations and honest memory figures out."""

from __future__ import annotations

import dataclasses
import logging
import math
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from dmc.full_attention import context_length
from dmc.kernels.layout import CacheLayout
from dmc.policies import CachePolicy
from dmc.runtime.allocator import OutOfBlocksError
from dmc.runtime.arguments import listed, of_kind, whole_number
from dmc.runtime.beams import BeamSearch
from dmc.runtime.decode_step import GpuRecorder, why_not_recorded
from dmc.runtime.forced import Forced, Keep, of_all_tokens
from dmc.runtime.generation import FinishReason, Generation, GenerationStats, Scoring
from dmc.runtime.lent_forwards import why_not_compiled
from dmc.runtime.memory import Activations, pool_bytes
from dmc.runtime.paged_cache import PagedCache, check_block_size
from dmc.runtime.prefix_cache import PrefixCache
from dmc.runtime.progress import advance_bar, open_bar
from dmc.runtime.prompt import encode
from dmc.runtime.request import Request, TokenEvent
from dmc.runtime.runner import Runner, fit_policy, layout_of
from dmc.runtime.sampling import Sampling, SamplingParams, choose_tokens
from dmc.runtime.scheduler import ScheduledChunk, Scheduler
from dmc.runtime.sequence import Sequence
from dmc.runtime.session import Session
from dmc.runtime.tally import Held
from dmc.runtime.text_stream import TextStream

logger = logging.getLogger(__name__)


def blocks_of(layout: CacheLayout, block_size: int, num_tokens: int) -> int:
    """Return the blocks of a sequence whose every token is appended: the worst case of a compressed cache."""
    return -(-num_tokens // block_size) * layout.num_layers * layout.num_kv_heads


def _check_kinds(model: Any, tokenizer: Any, kernels: Any) -> None:
    """Refuse what cannot be a model, a tokenizer or a backend's name."""
    if not (isinstance(model, torch.nn.Module) and hasattr(model, "config")):
        raise TypeError(f"model={model!r:.80}: expected a causal LM, as load_model(folder) returns one")
    if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
        raise TypeError(f"tokenizer={tokenizer!r}: expected an object, as AutoTokenizer.from_pretrained returns one")
    if not isinstance(kernels, str):
        raise ValueError(f"kernels={kernels!r}: expected the name of a backend, or 'auto'")


def _renamed(error: Exception, message: str) -> Exception:
    """Return an error of the same class that says more, or the same one if its class takes other arguments."""
    try:
        return type(error)(message)
    except TypeError:
        return error


def _not_finite(request: Request) -> ArithmeticError:
    tokens = request.prompt
    shown = ", ".join(map(str, tokens[:8])) + (", ..." if len(tokens) > 8 else "")
    return ArithmeticError(
        f"the model's logits are not finite after a prompt of {len(tokens)} tokens [{shown}] and "
        f"{len(request.logprobs)} generated ones: expected numbers; look for weights that are not, a dtype that "
        "overflows, or a logits_processor that leaves no token"
    )


class Engine:
    """Serves a compressed or stock causal LM from a paged cache, many sequences at once.

    `generate` and `score` run to the end; `submit`, `step` and `abort` are what they are made of, `stream` hands out
    tokens as they come, `session` keeps the cache between turns. One thread at a time.

    Args:
        model: from `retrofit`, `load_model` or `AutoModelForCausalLM`, in eval mode.
        tokenizer: needed for prompts given as text, and for stop strings.
        policy: training-free method, such as `dmc.policies.H2O`; None, or a ratio of 1: what the model's own gates do
            (full cache for a stock model).
        block_size: entries per page.
        memory: room for the cache's pages: bytes (int), a fraction of the device's free memory (float), "auto" (most of
            what is free beside the activations of the largest pass, no more than `max_batch_size` sequences of the
            model's full length), "auto/2" as one of two engines that share it; None: grow as needed.
        kernels: backend name, "auto" picks.
        max_batch_size: sequences in the cache at the same time, resting sessions included.
        prefill_chunk_size: most prompt tokens of one sequence in one forward pass; None: the whole prompt.
        token_budget: most tokens in one forward pass, over all sequences; None: no limit. Prompts under a policy are
            cut by `prefill_chunk_size` alone: whole, their layers are compressed one after the other.
        prefix_cache: whether beginnings that requests share are computed once, and kept as long as there is room. Under
            a policy they are computed again: what stays then depends on where a prompt ends.
        compile: whether the decoder layers are compiled by torch.compile, around their attention, in passes that only
            decode; the first such passes, with one sequence and with several, take the seconds of it.
        cuda_graphs: whether steps that only decode are recorded as CUDA graphs, one for each power of two of sequences,
            and replayed, the choice of tokens included; with the full cache, or gates alone, on one GPU. The model may
            not wait for the device, as most mixtures of experts do.
        kv_cache_dtype: what keys and values of slots are stored in: "auto", the model's dtype, or "int8", 8 bits and a
            float32 factor for each key and each value, rounded when they are written. Raw tokens and sums that gates
            keep beside the slots stay as they are.
    Raises:
        ValueError: an option is out of range, or the policy cannot work on 8 bits.
        TypeError: the policy is none.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        policy: CachePolicy | None = None,
        block_size: int = 16,
        memory: int | float | str | None = None,
        kernels: str = "auto",
        max_batch_size: int = 32,
        prefill_chunk_size: int | None = None,
        token_budget: int | None = 2048,
        prefix_cache: bool = False,
        cuda_graphs: bool = False,
        compile: bool = False,
        kv_cache_dtype: str = "auto",
    ) -> None:
        switches = {"prefix_cache": prefix_cache, "cuda_graphs": cuda_graphs, "compile": compile}
        for name, given in switches.items():
            if not isinstance(given, bool):
                raise ValueError(f"{name}={given!r}: expected True or False")
        _check_kinds(model, tokenizer, kernels)
        block_size = check_block_size(block_size)
        max_batch_size = whole_number("max_batch_size", max_batch_size)
        if prefill_chunk_size is not None:
            prefill_chunk_size = whole_number("prefill_chunk_size", prefill_chunk_size, also=", or None")
        if token_budget is not None:
            token_budget = whole_number("token_budget", token_budget, also=", or None")
        if policy is not None:
            policy = fit_policy(model, policy, block_size, prefill_chunk_size).worded(tokenizer)
            policy = None if policy.budget.ratio == 1 else policy
        if policy is not None:
            policy.check_dtype(kv_cache_dtype)
        self.model, self.tokenizer = model.eval(), tokenizer
        layout = layout_of(model, policy).stored_as(kv_cache_dtype)
        context = context_length(model.config)
        longest = max_batch_size * blocks_of(layout, block_size, context)
        largest_pass = num_logits = max_batch_size * min(prefill_chunk_size or context, context)
        if token_budget is not None:  # that whole prompts under a policy exceed, the last one let in at least
            num_logits = min(largest_pass, token_budget + max_batch_size)  # of a prompt the last token's alone
            largest_pass = min(largest_pass, token_budget + (0 if policy is None else context))
        activations = Activations.of(model.config, layout, largest_pass, num_logits, shows_attention=policy is not None)
        limit = pool_bytes(memory, layout.device, longest * layout.block_bytes(block_size), activations)
        num_blocks = None if limit is None else layout.ranks.minimum(limit // layout.block_bytes(block_size))
        if cuda_graphs and (reason := why_not_recorded(layout, policy, model.config)) is not None:
            raise ValueError(f"cuda_graphs=True: {reason}; use cuda_graphs=False")
        if compile and (reason := why_not_compiled(model, layout)) is not None:
            raise ValueError(f"compile=True: {reason}; use compile=False")
        self.cache = PagedCache(layout, max_batch_size, block_size, num_blocks, has_scratch_row=cuda_graphs)
        self.policy = policy
        """What compresses beside the model's own gates; None: nothing."""
        self._runner = Runner(
            model, self.cache, kernels, policy, record=GpuRecorder() if cuda_graphs else None, compiles=compile
        )
        self._prefixes = PrefixCache(self.cache) if prefix_cache and policy is None else None
        self._scheduler = Scheduler(self.cache, prefill_chunk_size, token_budget, policy, self._prefixes)
        self._requests: dict[Sequence, Request] = {}
        self._forced: dict[Sequence, Forced] = {}
        self._has_warned = False

    @property
    def blocks_in_use(self) -> int:
        """Number of blocks held by sequences, shared ones counted once; 0 when nothing runs and no session rests."""
        return self.cache.allocator.num_in_use - self.cache.blocks_only_in(self._prefixes or ())

    @property
    def num_running(self) -> int:
        """Number of sequences that hold a part of the cache and are being computed."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait for room: not admitted yet, or preempted."""
        return len(self._scheduler.waiting)

    @property
    def prefix_cache_bytes(self) -> int:
        """Bytes that the prefix cache alone holds; it gives its blocks up when a sequence needs them."""
        return 0 if self._prefixes is None else self._prefixes.num_bytes

    def clear_prefix_cache(self) -> None:
        """Forget what was computed before; needed when the model's weights have changed."""
        if self._prefixes is not None:
            self._prefixes.empty()

    def generate(
        self,
        prompts: Collection[str | list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
        progress: bool | None = None,
        after: Collection[list[int]] | None = None,
    ) -> list[Generation]:
        """Continue prompts together; each gets what it would get alone.

        Args:
            prompts: texts or token ids, not empty.
            params: sampling parameters of all prompts, or a list of one for each.
            progress: whether to show a bar on stderr; None: if that is a terminal and it takes more than a few seconds.
            after: tokens fed after each prompt has been compressed, as a session's next turn; may be empty.
        Returns:
            A generation for each prompt, in their order.
        Raises:
            ValueError: see `submit`; nothing has run.
            ArithmeticError: see `run`.
        """
        prompts = listed("prompts", prompts, "texts or lists of token ids")
        params = SamplingParams() if params is None else params
        every = params if isinstance(params, list) else [params] * len(prompts)
        if len(every) != len(prompts):
            raise ValueError(f"{len(every)} sampling parameters for {len(prompts)} prompts: give one, or one for each")
        turns = zip(prompts, every, after or [[]] * len(prompts), strict=True)
        requests = [self._request(each or prompt, own, context=prompt if each else None) for prompt, own, each in turns]
        try:
            for request in requests:
                self._start(request)
        except BaseException:
            self._abort_all(requests)
            raise
        self.run(requests, progress)
        return [request.generation for request in requests if request.generation is not None]

    def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        session: Session | None = None,
        after: list[int] | None = None,
    ) -> Request:
        """Queue a request; `step` generates its tokens.

        Args:
            prompt: text or token ids, not empty.
            params: sampling parameters; None: the defaults.
            session: session whose next turn the prompt is; None: a request without a session.
            after: tokens fed after the prompt has been compressed, as a session's next turn; None: nothing.
        Raises:
            ValueError: the prompt is empty, names unknown tokens or can never fit the memory; text or stop strings are
                given without a tokenizer; the session is closed, another engine's or its last turn has not finished.
            TypeError: an argument is of another kind.
        """
        request = self._request(after or prompt, params, session, streams_text=True, context=prompt if after else None)
        self._start(request)
        return request

    def step(self) -> list[TokenEvent]:
        """Run one forward pass.

        Returns:
            The new tokens of all requests; empty if the pass fed only parts of prompts, or no request is pending. A
            request that cannot continue (its logits are not finite, its logits processor raises, it outgrows the
            memory, a pass of it alone fails) ends with its `error` set and without an event. If a pass of several
            requests fails, each of them is computed again alone.
        Raises:
            BaseException: an error that is no `Exception`, such as Ctrl-C, or one outside of a pass. All requests have
                then been aborted and all blocks are free; sessions keep their tokens and are computed again.
        """
        try:
            chunks = self._scheduler.next_chunks()
            if (outgrown := self._scheduler.outgrown) is not None:
                self._scheduler.outgrown = None
                self._fail(outgrown, self._outgrown_error(outgrown), sound=True)
            try:
                return self._advance(chunks) if chunks else []
            except Exception as error:
                logger.warning("a pass of %d requests has failed", len(chunks), exc_info=True)
                if (guilty := self._scheduler.recover(chunks)) is not None:
                    self._fail(guilty, error)
                return []
        except BaseException:
            self._scheduler.reset()
            self._abort_all(list(self._requests.values()))
            raise

    def run(self, requests: Collection[Request], progress: bool | None = None) -> None:
        """Step until these requests have finished; an exception or Ctrl-C aborts them.

        Raises:
            ArithmeticError: the model's logits for one of them were not finite; the others have finished.
            OutOfBlocksError: one of them alone does not fit the memory; the others have finished.
            Exception: an error that the model raised for one of them; the others have finished.
            ValueError: one of them was submitted to another engine.
        """
        requests = [of_kind("requests", each, Request, "what `submit` returned") for each in requests]
        requests = [each.root or each for each in requests]  # continuations of one prompt end together
        for request in requests:
            self._check_is_mine(request)
        pending = {request for request in requests if request.generation is None}
        try:
            with open_bar(pending, progress) as bar:
                while pending:
                    events = [event for event in self.step() if event.request in pending]
                    pending = {request for request in pending if request.generation is None}
                    advance_bar(bar, events, len(self._scheduler.running), len(self._scheduler.waiting))
        except BaseException:
            self._abort_all(requests)
            raise
        if failed := [index for index, request in enumerate(requests) if request.error is not None]:
            more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
            error = requests[failed[0]].error
            assert error is not None
            raise _renamed(error, f"request {failed[0]} of {len(requests)} (from 0){more}: {error}") from error

    def abort(self, request: Request) -> None:
        """Abort a request and free its blocks; the tokens so far become its generation, and there is no event.

        Raises:
            ValueError: it was submitted to another engine.
        """
        self._check_is_mine(of_kind("request", request, Request, "what `submit` returned"))
        self._abort_all([request])

    def stream(
        self, prompt: str | list[int], params: SamplingParams | None = None, session: Session | None = None
    ) -> Iterator[TokenEvent]:
        """Continue one prompt, token by token, while other requests are computed too.

        The request starts with the first `next()`. Closing the iterator aborts it.

        Raises:
            ValueError: see `submit`.
            ArithmeticError: the model's logits were not finite.
        """
        return self._events(self._request(prompt, params, session, streams_text=True))

    def feed(self, prompt: str | list[int], session: Session) -> GenerationStats:
        """Compute a prompt into a session's cache without generating; `Session.feed` calls it.

        Raises:
            ValueError: see `submit`; nothing has run.
        """
        self._check_is_free(session)
        sequence = session.sequence
        tokens = self._encode(prompt, begins_text=not sequence.tokens)
        self._check_fits(len(sequence.tokens) + len(tokens))
        sequence.add_prompt(tokens)
        sequence.next_logit_position = len(sequence.tokens)
        forced = Forced([], of_all_tokens)
        self._run_forced({sequence: forced})
        assert forced.stats is not None
        sequence.next_prompt = len(sequence.tokens)
        return forced.stats

    def session(self) -> Session:
        """Start a session, whose cache stays between turns."""
        return Session(self)

    def fork(self, session: Session) -> Session:
        """Start a session that continues from another one's turns; `Session.fork` calls it.

        Raises:
            ValueError: see `submit`.
        """
        self._check_is_free(session)
        other = Session(self)
        (other.sequence,) = self._copies(session.sequence, 1)
        return other

    def end_session(self, session: Session) -> None:
        """Abort a session's request and free its blocks; `Session.close` calls it.

        Raises:
            ValueError: it is another engine's session.
        """
        self._check_is_own(session)
        session.is_closed, session.sequence.kept = True, False
        if (request := self._requests.get(session.sequence)) is not None:
            self._finish(request, "abort")
        self._scheduler.finish(session.sequence)

    def score(self, prompts: Collection[str | list[int]], continuations: Collection[str | list[int]]) -> list[Tensor]:
        """Teacher-force continuations through the compressed cache, many at once.

        Feeds prompt + continuation[:-1]; the cache compresses exactly as while generating.

        Returns:
            For each prompt the float32 log-probabilities [len(continuation), vocab].
        Raises:
            ValueError: as `submit`, or a continuation is empty.
        """
        return [scoring.logprobs for scoring in self.score_with_stats(prompts, continuations)]

    def score_with_stats(
        self,
        prompts: Collection[str | list[int] | Session],
        continuations: Collection[str | list[int]],
        keep: Keep = of_all_tokens,
        after: Collection[list[int]] | None = None,
    ) -> list[Scoring]:
        """Score as `score` does, and measure the memory of each sequence at its last step.

        Args:
            prompts: texts, token ids, or sessions, which continue from their cache and can then only be closed.
            continuations: texts or token ids, one for each prompt.
            keep: reduces the log-probabilities, [n, vocab], to what is returned: those of whole vocabularies are
                gigabytes for a long continuation.
            after: tokens fed between each prompt and its continuation, as a session's next turn, once the prompt has
                been compressed; None: nothing.
        Raises:
            ValueError: see `score`; or there are not as many of each.
        """
        prompts = listed("prompts", prompts, "texts or lists of token ids")
        continuations = listed("continuations", continuations, "texts or lists of token ids")
        if len(prompts) != len(continuations):
            raise ValueError(f"{len(prompts)} prompts and {len(continuations)} continuations: give as many of each")
        forced: dict[Sequence, Forced] = {}
        for prompt, between, continuation in zip(prompts, after or [[]] * len(prompts), continuations, strict=True):
            targets, sequence = self._encode(continuation, begins_text=False), Sequence([], next_logit_position=0)
            if isinstance(prompt, Session):
                self._check_is_free(prompt)
                sequence = prompt.sequence
            else:
                sequence.add_prompt(self._encode(prompt))
                sequence.next_prompt = len(sequence.tokens)
            if between:
                sequence.add_prompt(list(between))
            sequence.next_logit_position = len(sequence.tokens) - 1
            sequence.tokens += targets[:-1]
            self._check_fits(len(sequence.tokens))
            forced[sequence] = Forced(targets, keep)
        self._run_forced(forced)
        return [each.scoring() for each in forced.values()]

    def _run_forced(self, forced: dict[Sequence, Forced]) -> None:
        """Feed sequences with the continuations that are given."""
        self._forced |= forced
        try:
            for sequence in forced:
                self._scheduler.submit(sequence)
            while any(each.stats is None and each.error is None for each in forced.values()):
                self.step()
            if errors := [each.error for each in forced.values() if each.error is not None]:
                raise errors[0]
        finally:
            for sequence in forced:
                self._forced.pop(sequence)
                self._scheduler.finish(sequence)
                sequence.num_preemptions = 0

    def _request(
        self,
        prompt: str | list[int],
        params: SamplingParams | None,
        session: Session | None = None,
        streams_text: bool = False,
        context: str | list[int] | None = None,
    ) -> Request:
        """Check a request and put it together, behind a context of its own; nothing is queued, no session grows."""
        kind = "SamplingParams(...), one for all prompts or a list of one for each"
        params = SamplingParams() if params is None else of_kind("params", params, SamplingParams, kind)
        for name, tokens in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            if max(tokens, default=0) >= self._vocab_size:
                raise ValueError(f"{name}={tokens!r:.80}: the model knows 0 to {self._vocab_size - 1}, no other comes")
        if params.prompt_logprobs is not None and self.policy is not None:
            raise ValueError(
                f"prompt_logprobs={params.prompt_logprobs}: a policy compresses a prompt when it ends, its own "
                "tokens would be predicted from the full cache; use `score`, or no policy"
            )
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop={params.stop!r} was given, but the engine has no tokenizer: pass tokenizer=")
        if session is not None:
            self._check_is_free(session)
            if params.n > 1 or params.beam_width is not None:
                several = f"n={params.n}" if params.beam_width is None else f"beam_width={params.beam_width}"
                raise ValueError(f"{several}: a session goes on from one continuation; give n=1 and no beam_width")
        sequence = Sequence([], next_logit_position=0) if session is None else session.sequence
        if context is not None:
            sequence.add_prompt(self._encode(context))
            sequence.next_prompt = len(sequence.tokens)
        end = None if params.ignore_eos else self.model.generation_config.eos_token_id
        ends = {*params.stop_token_ids, *(end if isinstance(end, list) else [] if end is None else [end])}
        params = dataclasses.replace(params, stop_token_ids=tuple(each for each in ends if each >= 0))  # -1: none
        if params.beam_width is not None and params.num_top > self._vocab_size:
            raise ValueError(
                f"beam_width={params.beam_width}: the model knows {self._vocab_size} tokens, {len(ends)} of which end "
                "a continuation; give fewer beams"
            )
        needs_text = bool(params.stop) or (streams_text and self.tokenizer is not None)
        request = Request(
            sequence,
            prompt=self._encode(prompt, begins_text=not sequence.tokens),
            params=params,
            generator=self._generator(params),
            text_stream=TextStream(self.tokenizer, params.stop) if needs_text else None,
            search=None if params.beam_width is None else BeamSearch(params),
        )
        self._check_can_start(request)
        return request

    def _generator(self, params: SamplingParams, index: int = 0) -> torch.Generator | None:
        if params.temperature == 0:
            return None
        seed = params.seed
        if seed is None:
            seed = self.cache.layout.ranks.minimum(int(torch.randint(2**62, ())))  # all ranks must draw alike
        return torch.Generator().manual_seed((seed + index) % 2**64)

    def _encode(self, text: str | list[int], begins_text: bool = True) -> list[int]:
        return encode(text, self.tokenizer, self._vocab_size, begins_text)

    @property
    def _vocab_size(self) -> int:
        return self.model.get_input_embeddings().num_embeddings

    def _check_is_free(self, session: Session) -> None:
        """Refuse a session that is another engine's or closed, or of which a turn runs."""
        self._check_is_own(session)
        if session.is_closed:
            raise ValueError("the session is closed: start another one")
        self._check_has_no_turn(session.sequence)

    def _check_is_own(self, session: Session) -> None:
        if of_kind("session", session, Session, "what `session()` returned").engine is not self:
            raise ValueError("the session is another engine's: give it to that one")

    def _check_is_mine(self, request: Request) -> None:
        """Refuse a request that runs elsewhere: its row names another sequence's blocks here."""
        if request.generation is None and not any(
            self._requests.get(each.sequence) is each for each in request.branches
        ):
            raise ValueError("the request is another engine's, or has not begun: give it to that one")

    def _check_has_no_turn(self, sequence: Sequence) -> None:
        if sequence in self._requests:
            raise ValueError("the session's last turn has not finished: run it to its end, or abort it")

    def _check_can_start(self, request: Request) -> None:
        self._check_has_no_turn(request.sequence)
        self._check_fits(len(request.sequence.tokens) + len(request.prompt) + request.params.max_new_tokens - 1)

    def _check_fits(self, num_tokens: int) -> None:
        cache, limit = self.cache, context_length(self.model.config)
        blocks = cache.blocks_for(num_tokens)
        if not cache.grows and blocks > cache.allocator.num_blocks:
            raise ValueError(
                f"a sequence of {num_tokens} tokens may need {blocks} blocks at the compression ratio "
                f"{cache.expected_ratio:g} that is expected, memory= holds {cache.allocator.num_blocks}: "
                f"give at least {blocks * cache.block_bytes} bytes, or shorten it"
            )
        if num_tokens > limit and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"a sequence may come to {num_tokens} tokens, the model is made for {limit} positions "
                "(max_position_embeddings): what it predicts beyond them is not to be trusted",
                stacklevel=2,
            )

    def _start(self, request: Request) -> None:
        self._check_can_start(request)
        request.begin()
        self._requests[request.sequence] = request
        self._scheduler.submit(request.sequence)

    def _events(self, request: Request) -> Iterator[TokenEvent]:
        self._start(request)
        inbox = request.inbox = deque()
        try:
            while request.generation is None or inbox:
                while inbox:
                    yield inbox.popleft()
                if request.generation is None:
                    self.step()
            if request.error is not None:
                raise request.error
        finally:
            self.abort(request)

    def _advance(self, chunks: list[ScheduledChunk]) -> list[TokenEvent]:
        if self._runner.is_recorded(chunks) and (plain := self._plain_requests(chunks)):
            params, uniforms = [each.params for each in plain], [each.uniform for each in plain]
            return self._accept(plain, self._runner.forward(chunks, Sampling.of(params, uniforms, self._vocab_size)))
        logits = self._runner.forward(chunks)
        asking: list[Request] = []
        rows: list[int] = []
        begin = 0
        for chunk in chunks:
            end = begin + chunk.num_logits
            if (forced := self._forced.get(chunk.sequence)) is not None:
                self._force(chunk.sequence, forced, logits[begin:end])
            elif chunk.num_logits:
                request = self._requests[chunk.sequence]
                sequence = chunk.sequence
                if sequence.next_logit_position < sequence.num_computed_tokens - (not sequence.num_waiting):
                    begin = request.take_prompt(logits[begin:end]) + begin
                if begin == end:
                    continue
                is_first = not request.logprobs
                is_root = request.root is None and request.search is None
                if is_first and is_root and len(request.branches) < request.params.n:
                    for copy in self._copies(request.sequence, request.params.n - 1):
                        self._add_branch(request, copy)
                asking += [each for each in request.branches if not each.logprobs] if is_first else [request]
                rows += [begin] * (len(asking) - len(rows))
            begin = end
        return self._sample(asking, logits if rows == list(range(len(logits))) else logits[rows]) if asking else []

    def _plain_requests(self, chunks: list[ScheduledChunk]) -> list[Request] | None:
        """Return the requests of a decoding step if the logits alone decide their next tokens; None otherwise."""
        found = [self._requests.get(each.sequence) for each in chunks]
        plain = [each for each in found if each is not None and each.logprobs and not each.params.changes_logits]
        return plain if len(plain) == len(found) else None

    def _copies(self, sequence: Sequence, count: int) -> list[Sequence]:
        """Fork a sequence; a copy for which there is no room shares nothing, and is computed again."""
        copies = [sequence.copy() for _ in range(count)]
        if sequence.row is not None:
            for each in copies:
                self.cache.tally.close_row(sequence.row, each.held)
            try:
                self._scheduler.fork(sequence, copies)
            except BaseException:  # of a pool that cannot grow: nobody would ever end what was copied
                self._drop(copies)
                raise
        return copies

    def _drop(self, sequences: Iterable[Sequence]) -> None:
        """Free sequences that are no request's."""
        for each in sequences:
            self._scheduler.forget(each)

    def _add_branch(self, request: Request, sequence: Sequence) -> None:
        """Begin another continuation of a prompt, with nothing generated yet."""
        index = len(request.branches)
        other = dataclasses.replace(
            request,
            sequence=sequence,
            generator=self._generator(request.params, index),
            text_stream=None if request.text_stream is None else TextStream(self.tokenizer, request.params.stop),
            logprobs=[],
            top_logprobs=[],
            root=request,
            alternatives=[],
            inbox=None,
            _history=None,
            _uniform=None,
        )
        if sequence.row is None:
            other.stats_before = self._stats(request)
        self._requests[sequence] = other
        request.alternatives.append(other)

    def _extend_beam(self, beam: Request, likely: list[tuple[int, float]]) -> list[TokenEvent]:
        """Note a beam's next tokens; where those of all beams are known, the best go on, or the search ends."""
        root, search = beam.root or beam, beam.search
        assert search is not None
        beams = root.branches
        search.likely[beams.index(beam)] = likely
        beam.sequence.next_logit_position += 1
        if len(search.likely) < len(beams):
            return []
        going_on, ended = search.extend([each.logprobs for each in beams])
        for extension in ended:
            search.end(extension, beams[extension.beam].steps, self._stats(beams[extension.beam]))
        if search.is_over(going_on, len(beam.logprobs) + 1):
            return self._end_search(root, search)
        extended = [each.beam for each in going_on]
        pruned = [each.sequence for index, each in enumerate(beams) if index not in extended]
        self._drop(pruned)
        free: dict[int, list[Sequence]] = {}
        try:
            for index in {*extended}:
                free[index] = self._copies(beams[index].sequence, extended.count(index) - 1)
        except BaseException:
            self._drop(copy for copies in free.values() for copy in copies)
            raise
        for index, copies in free.items():
            copies.append(beams[index].sequence)
        for sequence in pruned:
            self._requests.pop(sequence)
        after = [(free[each.beam].pop(), [*beams[each.beam].steps, each.step]) for each in going_on]
        for index, (sequence, steps) in enumerate(after):
            if index == len(root.branches):
                self._add_branch(root, sequence)
            self._requests[sequence] = root.branches[index]
            root.branches[index].take_over(sequence, steps)
            self._scheduler.resume(sequence)
        return []

    def _end_search(self, root: Request, search: BeamSearch) -> list[TokenEvent]:
        """Tell of the tokens of all continuations that have ended, the best first."""
        prompt = root.sequence.tokens[: len(root.sequence.tokens) - len(root.logprobs)]
        self._scheduler.finish(root.sequence)  # the prefix cache may take the prompt from it
        for each in root.branches:
            self._requests.pop(each.sequence)
        self._drop(each.sequence for each in root.branches)
        for index, ended in enumerate(search.ended):
            sequence = Sequence([*prompt], next_logit_position=len(prompt))
            if index == len(root.branches):
                self._add_branch(root, sequence)
            request = self._requests[sequence] = root.branches[index]
            request.sequence, request.logprobs, request.top_logprobs = sequence, [], []
            request.stats_before = ended.stats
        brought = [
            [request.accept(*step) for step in ended.steps]
            for request, ended in zip(root.branches, search.ended, strict=True)
        ]
        for request, events in zip(root.branches, brought, strict=True):
            self._finish(request, events[-1].finish_reason or "length")
        return [event for events in brought for event in events]

    def _sample(self, requests: list[Request], logits: Tensor) -> list[TokenEvent]:
        choice, errors = choose_tokens(
            logits,
            [request.params for request in requests],
            [request.uniform for request in requests],
            [request.history(logits.shape[-1], logits.device) for request in requests],
        )
        return self._accept(requests, self._runner.packed(choice), errors, logits)

    def _accept(
        self,
        requests: list[Request],
        packed: Tensor,
        errors: dict[int, Exception] | None = None,
        logits: Tensor | None = None,
    ) -> list[TokenEvent]:
        """Read what a step has brought, the one time that the host waits for it, and tell of the tokens.

        Args:
            requests: whose they are.
            packed: see `Runner.packed`; rows beyond the requests' are not read.
            errors: of the requests that have failed already.
            logits: what requests' own parameters have changed; None: they do not.
        """
        ranks = self.cache.layout.ranks
        # ranks may have summed in another order, and a token of their own would part them for good
        *drawn, (num_free, *_) = ranks.of_first(packed).tolist()
        if ranks.size == 1:
            self.cache.note_free(int(num_free))
        events: list[TokenEvent] = []
        for index, (request, (token, logprob, *top)) in enumerate(zip(requests, drawn, strict=False)):
            if request.outcome is not None:  # another beam of its search has failed
                continue
            own_error = None if errors is None else errors.get(index)
            if own_error is not None or not math.isfinite(logprob):
                # else it is the model's fault, not the request's
                is_sound = logits is not None and bool(logits[index].amax().isfinite())
                self._fail(request.sequence, own_error or _not_finite(request), is_sound)
                continue
            likely = list(zip(map(int, top[::2]), top[1::2], strict=True))
            try:
                if request.search is not None:
                    events += self._extend_beam(request, likely[: request.params.num_top])
                    continue
                events.append(request.accept(int(token), logprob, dict(likely[: request.params.top_logprobs])))
            except Exception as error:  # of its tokenizer
                self._fail(request.sequence, error, sound=True)
                continue
            if (reason := events[-1].finish_reason) is not None:
                self._finish(request, reason)
        for request in requests:
            if request.search is not None and request.search.likely:
                request.stats_before = self._stats(request)
                self._scheduler.rest(request.sequence)
        return events

    def _fail(self, sequence: Sequence, error: Exception, sound: bool = False) -> None:
        """End a sequence that cannot continue, with its error; `sound`: its cache is intact and may be shared."""
        if (forced := self._forced.get(sequence)) is not None:
            forced.error = error
            self._scheduler.finish(sequence)
            return
        request = self._requests[sequence]
        root = request.root or request
        root.error = error
        for each in [request] if request.search is None else root.branches:
            self._finish(each, "error", sound=sound)

    def _outgrown_error(self, sequence: Sequence) -> OutOfBlocksError:
        cache = self.cache
        return OutOfBlocksError(
            f"a sequence of {len(sequence.tokens)} tokens has outgrown the {cache.allocator.num_blocks} blocks that "
            f"memory= holds: it holds {cache.slots(sequence.row or 0).double().mean():.0f} entries per head after "
            f"{sequence.num_computed_tokens}; give more memory, or shorten it"
        )

    def _force(self, sequence: Sequence, forced: Forced, logits: Tensor) -> None:
        if len(logits):
            forced.add(logits)
        sequence.next_logit_position += len(logits)
        if not sequence.num_waiting:
            forced.stats = GenerationStats.of(sequence, self.cache)
            self._scheduler.finish(sequence, sound=self._prefixes is None or forced.is_finite)

    def _finish(self, request: Request, reason: FinishReason, sound: bool = True) -> None:
        sequence = request.sequence
        request.finish(reason, self._stats(request), self.tokenizer)
        self._requests.pop(sequence, None)
        self._scheduler.finish(sequence, sound)
        sequence.num_preemptions, sequence.held = 0, Held()
        if sequence.row is not None:
            self.cache.tally.open_row(sequence.row, sequence.held)

    def _stats(self, request: Request) -> GenerationStats:
        """Memory of a request's sequence, or what it had when it last had any."""
        held = request.stats_before if request.sequence.row is None else None
        return held or GenerationStats.of(request.sequence, self.cache)

    def _abort_all(self, requests: Collection[Request]) -> None:
        for each in [each for request in requests for each in request.branches]:
            if self._requests.get(each.sequence) is each:
                self._finish(each, "abort")
