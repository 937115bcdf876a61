"""The engine: prompts in, continuations and honest memory figures out."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from dmc.compression.full_attention import context_length
from dmc.kernels.layout import CacheLayout
from dmc.policies import CachePolicy
from dmc.runtime.active_requests import ActiveRequests
from dmc.runtime.allocator import OutOfBlocksError
from dmc.runtime.arguments import listed, of_kind, whole_number
from dmc.runtime.decode_step import GpuRecorder, why_not_recorded
from dmc.runtime.forced import Forced, Keep, of_all_tokens
from dmc.runtime.generation import Generation, GenerationStats, Scoring
from dmc.runtime.lent_forwards import why_not_compiled
from dmc.runtime.next_tokens import NextTokens
from dmc.runtime.paged_cache import PagedCache, check_block_size
from dmc.runtime.pool_size import Activations, pool_bytes
from dmc.runtime.prefix_cache import PrefixCache
from dmc.runtime.progress import advance_bar, open_bar
from dmc.runtime.prompt import encode
from dmc.runtime.request import ForcedRequest, Request, TokenEvent
from dmc.runtime.runner import Runner, fit_policy, layout_of
from dmc.runtime.sampling import SamplingParams, new_generator
from dmc.runtime.scheduler import Scheduler
from dmc.runtime.sequence import Sequence
from dmc.runtime.session import Session
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
            policy = fit_policy(model, policy, block_size, prefill_chunk_size).tokenized(tokenizer)
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
        num_blocks = None if limit is None else layout.ranks.all_reduce(limit // layout.block_bytes(block_size), "min")
        if cuda_graphs and (reason := why_not_recorded(layout, policy, model.config)) is not None:
            raise ValueError(f"cuda_graphs=True: {reason}; use cuda_graphs=False")
        if compile and (reason := why_not_compiled(model, layout)) is not None:
            raise ValueError(f"compile=True: {reason}; use compile=False")
        self.cache = PagedCache(layout, max_batch_size, block_size, num_blocks, has_scratch_row=cuda_graphs)
        self.policy = policy
        """What compresses beside the model's own gates; None: nothing."""
        record = GpuRecorder() if cuda_graphs else None
        self._runner = Runner(model, self.cache, kernels, policy, record, compiles=compile)
        self._prefixes = PrefixCache(self.cache) if prefix_cache and policy is None else None
        self._scheduler = Scheduler(self.cache, prefill_chunk_size, token_budget, policy, self._prefixes)
        self._active = ActiveRequests(self._scheduler, tokenizer)
        self._vocab_size = model.get_input_embeddings().num_embeddings
        self._next_tokens = NextTokens(self._runner, self._active, self._vocab_size)
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
        return self._run_together(requests, progress)

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
            memory, its pass fails) ends with its `error` set and without an event.
        Raises:
            BaseException: an error that is no `Exception`, such as Ctrl-C, or one outside of a pass. All requests have
                then been aborted and all blocks are free; sessions keep their tokens and are computed again.
        """
        try:
            chunks = self._scheduler.next_chunks()
            if (outgrown := self._scheduler.outgrown) is not None:
                self._scheduler.outgrown = None
                self._active.fail(outgrown, self._outgrown_error(outgrown), sound=True)
            try:
                return self._next_tokens.after(chunks) if chunks else []
            except Exception as error:
                logger.warning("a pass of %d requests has failed", len(chunks), exc_info=True)
                self._active.fail_requests(self._scheduler.recover(chunks), error)
                return []
        except BaseException:
            self._scheduler.reset()
            self._active.abort([*self._active.by_sequence.values()])
            raise

    def run(self, requests: Collection[Request], progress: bool | None = None) -> None:
        """Step until these requests have finished; an exception or Ctrl-C aborts them.

        Raises:
            ArithmeticError: the model's logits for one of them were not finite; the others have finished.
            OutOfBlocksError: one of them alone does not fit the memory; the others have finished.
            Exception: an error that the model raised for one of them; the others have finished.
            ValueError: one of them was submitted to another engine.
        """
        requests = [self._own_root("requests", each) for each in requests]
        pending = {request for request in requests if request.generation is None}
        try:
            with open_bar(pending, progress) as bar:
                while pending:
                    events = [event for event in self.step() if event.request in pending]
                    pending = {request for request in pending if request.generation is None}
                    advance_bar(bar, events, len(self._scheduler.running), len(self._scheduler.waiting))
        except BaseException:
            self._active.abort(requests)
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
        self._own_root("request", request)
        self._active.abort([request])

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
        sequence = self._sequence(session)
        tokens = self._encode(prompt, begins_text=not sequence.tokens)
        request = ForcedRequest(sequence, tokens, SamplingParams(max_new_tokens=1))
        (generation,) = self._run_together([request])
        sequence.next_prompt = len(sequence.tokens)
        return generation.stats

    def session(self) -> Session:
        """Start a session, whose cache stays between turns."""
        return Session(self, self._active)

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
        requests = []
        for prompt, between, continuation in zip(prompts, after or [[]] * len(prompts), continuations, strict=True):
            tokens = self._encode(continuation, begins_text=False)
            is_session = isinstance(prompt, Session)
            sequence = self._sequence(prompt) if is_session else self._sequence(None, self._encode(prompt))
            params = SamplingParams(max_new_tokens=len(tokens))
            requests.append(ForcedRequest(sequence, list(between), params, forced=Forced(tokens, keep)))
            self._check_can_start(requests[-1])
        every = zip(requests, self._run_together(requests), strict=True)
        return [Scoring(torch.cat(request.forced.kept), generation.stats) for request, generation in every]

    def _run_together(self, requests: Collection[Request], progress: bool | None = False) -> list[Generation]:
        """Start requests and run them to their end; none goes on if one cannot start."""
        try:
            for request in requests:
                self._start(request)
        except BaseException:
            self._active.abort(requests)
            raise
        self.run(requests, progress)
        return [request.generation for request in requests if request.generation is not None]

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
        sequence = self._sequence(session, None if context is None else self._encode(context))
        if session is not None and params.n > 1:
            raise ValueError(f"n={params.n}: a session goes on from one continuation; give n=1")
        end = None if params.ignore_eos else self.model.generation_config.eos_token_id
        ends = {*params.stop_token_ids, *(end if isinstance(end, list) else [] if end is None else [end])}
        params = dataclasses.replace(params, stop_token_ids=tuple(each for each in ends if each >= 0))  # -1: none
        needs_text = bool(params.stop) or (streams_text and self.tokenizer is not None)
        request = Request(
            sequence,
            prompt=self._encode(prompt, begins_text=not sequence.tokens),
            params=params,
            generator=new_generator(params, self.cache.layout.ranks),
            text_stream=TextStream(self.tokenizer, params.stop) if needs_text else None,
        )
        self._check_can_start(request)
        return request

    def _sequence(self, session: Session | None, context: list[int] | None = None) -> Sequence:
        """Return the sequence that a request continues: a session's, or a new one that begins with a context."""
        if session is not None:
            if of_kind("session", session, Session, "what `session()` returned").engine is not self:
                raise ValueError("the session is another engine's: give it to that one")
            return session.idle_sequence()
        sequence = Sequence([], next_logit_position=0)
        if context is not None:
            sequence.add_prompt(context)
            sequence.next_prompt = len(sequence.tokens)
        return sequence

    def _encode(self, text: str | list[int], begins_text: bool = True) -> list[int]:
        return encode(text, self.tokenizer, self._vocab_size, begins_text)

    def _own_root(self, name: str, request: Request) -> Request:
        """Return the request that was submitted here; another engine's names other sequences' blocks here."""
        root = of_kind(name, request, Request, "what `submit` returned").root or request
        if root.generation is None and root not in self._active:
            raise ValueError("the request is another engine's, or has not begun: give it to that one")
        return root

    def _check_can_start(self, request: Request) -> None:
        self._active.check_is_idle(request.sequence)
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
        self._active.start(request)

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

    def _outgrown_error(self, sequence: Sequence) -> OutOfBlocksError:
        cache = self.cache
        return OutOfBlocksError(
            f"a sequence of {len(sequence.tokens)} tokens has outgrown the {cache.allocator.num_blocks} blocks that "
            f"memory= holds: it holds {cache.slots(sequence.row or 0).double().mean():.0f} entries per head after "
            f"{sequence.num_computed_tokens}; give more memory, or shorten it"
        )
