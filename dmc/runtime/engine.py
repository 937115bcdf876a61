"""The engine: prompts in, continuations and memory figures out."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from dmc.compression.full_attention import context_length
from dmc.policies import CachePolicy
from dmc.runtime import carried_cache
from dmc.runtime.decode_steps import GpuRecorder, why_not_recorded
from dmc.runtime.engine_core import EngineCore
from dmc.runtime.generation import Generation, GenerationStats, Scoring
from dmc.runtime.input_processor import InputProcessor
from dmc.runtime.model_view import fit_policy, is_compiled, layout_of
from dmc.runtime.options import EngineOptions, SamplingParams
from dmc.runtime.paged_cache import PagedCache
from dmc.runtime.pool_size import pool_blocks
from dmc.runtime.prefix_cache import PrefixCache
from dmc.runtime.request import ForcedRequest, Keep, Request, TokenEvent, of_all_tokens
from dmc.runtime.runner import Runner
from dmc.runtime.scheduler import Scheduler
from dmc.runtime.session import Session

SECONDS_BEFORE_BAR = 3  # a shorter run shows no progress bar unless one was requested


def _renamed(error: Exception, message: str) -> Exception:
    """Return an error of the same class that says more, or the same one if its class takes other arguments."""
    try:
        return type(error)(message)
    except TypeError:
        return error


class Engine:
    """Serves a compressed or stock causal LM from a paged cache, many sequences at once.

    `generate` and `score` run requests to their end. They call `submit`, `step` and `abort`. `stream` yields
    tokens as they come, `session` keeps the cache between turns. The engine is not thread-safe.

    Args:
        model: from `retrofit`, `load_model` or `AutoModelForCausalLM`, in eval mode.
        tokenizer: needed for prompts given as text, and for stop strings.
        policy: such as `dmc.policies.H2O`; None, or a ratio of 1: the model's own gates, or the full cache.
        block_size: entries per page.
        memory: room for the cache's pages. Bytes (int); a fraction of the device's free memory (float); "auto": what
            the activations of the largest pass leave, at most `max_batch_size` sequences of the model's full length;
            "auto/2": for one of two engines on the device; None: grow as needed.
        kernels: backend name; "auto" chooses one.
        max_batch_size: sequences in the cache at the same time, resting sessions included.
        prefill_chunk_size: most prompt tokens of one sequence in one forward pass; None: the whole prompt.
        token_budget: most tokens in one forward pass, over all sequences; None: no limit. Only `prefill_chunk_size`
            cuts prompts under a policy.
        prefix_cache: whether prefixes that requests share are computed once, and kept while there is room. Policies
            compute them again, because what they keep depends on the prompt's end.
        compile: whether torch.compile compiles the decoder layers of passes that only decode; "auto": on a GPU that
            can. The first such passes take seconds.
        cuda_graphs: whether steps that only decode are recorded as CUDA graphs and replayed, sampling included, with
            one graph for each power of two of sequences; "auto": where it is possible. If recording fails, a warning
            says so and steps run eagerly.
        kv_cache_dtype: dtype of the stored keys and values. "auto": the model's; "int8": 8 bits, and a float32 factor
            for each key and each value. Raw tokens and sums of the gates are not rounded.
    Raises:
        ValueError: an option is out of range, or the policy cannot work on 8 bits.
        TypeError: `model` is no causal LM, or `policy` no policy.
        NotImplementedError: the cache does not serve the model's attention, or the policy does not.
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
        cuda_graphs: bool | str = False,
        compile: bool | str = False,
        kv_cache_dtype: str = "auto",
    ) -> None:
        if not (isinstance(model, torch.nn.Module) and hasattr(model, "config")):
            raise TypeError(f"model={model!r:.80}: expected a causal LM, as load_model(folder) returns one")
        given: Any = (block_size, memory, kernels, max_batch_size, prefill_chunk_size, token_budget, prefix_cache)
        given += (cuda_graphs, compile, kv_cache_dtype)
        options = EngineOptions(*given)
        if policy is not None:
            policy = fit_policy(model, policy, block_size, prefill_chunk_size).tokenized(tokenizer)
            policy = None if policy.budget.ratio == 1 else policy
        if policy is not None:
            policy.check_dtype(kv_cache_dtype)
        layout = layout_of(model, policy).stored_as(kv_cache_dtype)
        if cuda_graphs and (reason := why_not_recorded(layout, policy, model.config)) is not None:
            if cuda_graphs != "auto":
                raise ValueError(f"cuda_graphs=True: {reason}; use cuda_graphs=False")
            cuda_graphs = False
        num_blocks = pool_blocks(options, model.config, layout, has_policy=policy is not None)
        self.model: Any = model.eval()
        self.tokenizer = tokenizer
        recorded_length = context_length(model.config) if cuda_graphs else None
        self.cache = PagedCache(layout, max_batch_size, block_size, num_blocks, recorded_length)
        self.policy = policy
        """The policy that compresses, beside the model's own gates; None: no policy."""
        record = GpuRecorder(layout.device) if cuda_graphs else None
        self._runner = Runner(model, self.cache, kernels, policy, record, compiles=is_compiled(model, layout, compile))
        self._prefixes = PrefixCache(self.cache) if prefix_cache and policy is None else None
        self._scheduler = Scheduler(self.cache, prefill_chunk_size, token_budget, policy, self._prefixes)
        self._core = EngineCore(self._scheduler, self._runner)
        self._inputs = InputProcessor(model, tokenizer, policy, self._core)

    @property
    def blocks_in_use(self) -> int:
        """Number of blocks held by sequences, shared ones counted once; 0 when nothing runs, rests or is frozen."""
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
        """Bytes that the prefix cache alone holds; its blocks are freed when a sequence needs them."""
        return 0 if self._prefixes is None else self._prefixes.num_bytes

    def clear_prefix_cache(self) -> None:
        """Empty the prefix cache; call it after a change of the model's weights."""
        if self._prefixes is not None:
            self._prefixes.empty()

    def generate(
        self,
        prompts: Collection[str | list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
        progress: bool | None = None,
        after: Collection[list[int]] | None = None,
    ) -> list[Generation]:
        """Continue prompts in one batch; each gets the tokens that it gets alone.

        Args:
            prompts: texts or token ids, not empty.
            params: sampling parameters of all prompts, or a list of one for each.
            progress: whether to show a bar on stderr; None: on a terminal, after a few seconds.
            after: tokens fed after each prompt has been compressed, as a session's next turn; may be empty.
        Returns:
            A generation for each prompt, in their order.
        Raises:
            ValueError: see `submit`; nothing has run.
            ArithmeticError: see `run`.
        """
        return self._run_together(self._inputs.continued(prompts, params, after), progress)

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
            ValueError: the prompt is empty, has unknown tokens or can never fit the memory; text or stop strings need a
                tokenizer; the session is closed, belongs to another engine, or its last turn has not finished.
            TypeError: an argument has another type.
        """
        request = self._inputs.request(after or prompt, params, session, context=prompt if after else None)
        self._start(request)
        return request

    def step(self) -> list[TokenEvent]:
        """Run one forward pass.

        Returns:
            The new tokens of all requests; empty if the pass fed only parts of prompts, or no request is pending. A
            request that cannot continue ends with its `error` set and without an event. Then its logits are not finite,
            its logits processor raises, it outgrows the memory, or its pass fails.
        Raises:
            BaseException: Ctrl-C, or an error outside of a pass. All requests are then aborted and all blocks free;
                sessions keep their tokens and are computed again.
        """
        return self._core.step()

    def run(self, requests: Collection[Request], progress: bool | None = None) -> None:
        """Step until these requests have finished; an exception or Ctrl-C aborts them.

        Raises:
            ArithmeticError: the model's logits for one of them were not finite; the others have finished.
            OutOfBlocksError: one of them alone does not fit the memory; the others have finished.
            Exception: an error that the model raised for one of them; the others have finished.
            ValueError: one of them was submitted to another engine.
        """
        requests = [self._submitted_here(request) for request in requests]
        pending = {request for request in requests if request.generation is None}
        hidden = None if progress is None else not progress
        delay = 0 if progress else SECONDS_BEFORE_BAR
        try:
            with tqdm(total=len(pending), desc="generating", unit=" requests", disable=hidden, delay=delay) as bar:
                num_tokens = 0
                while pending:
                    num_tokens += sum(event.request in pending for event in self.step())
                    unfinished = {request for request in pending if request.generation is None}
                    counts = {"tokens": num_tokens, "running": self.num_running, "waiting": self.num_waiting}
                    bar.set_postfix(counts, refresh=False)
                    bar.update(len(pending) - len(unfinished))
                    pending = unfinished
        except BaseException:
            self._core.abort(requests)
            raise
        if failed := [index for index, request in enumerate(requests) if request.error is not None]:
            more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
            error = requests[failed[0]].error
            assert error is not None
            raise _renamed(error, f"request {failed[0]} of {len(requests)} (from 0){more}: {error}") from error

    def abort(self, request: Request) -> None:
        """Abort a request and free its blocks; its generation holds the tokens so far. There is no event.

        Raises:
            ValueError: it was submitted to another engine.
        """
        self._submitted_here(request)
        self._core.abort([request])

    def stream(
        self, prompt: str | list[int], params: SamplingParams | None = None, session: Session | None = None
    ) -> Iterator[TokenEvent]:
        """Continue one prompt, token by token, while other requests are computed too.

        The request starts with the first `next()`. Closing the iterator aborts it.

        Raises:
            ValueError: see `submit`.
            ArithmeticError: the model's logits were not finite.
        """
        return self._events(self._inputs.request(prompt, params, session))

    def feed(self, prompt: str | list[int], session: Session) -> GenerationStats:
        """Compute a prompt into a session's cache without generating; `Session.feed` calls it."""
        sequence = self._inputs.sequence(session)
        tokens = self._inputs.encode(prompt, begins_text=not sequence.tokens)
        request = ForcedRequest(sequence, tokens, SamplingParams(max_new_tokens=1))
        (generation,) = self._run_together([request])
        return generation.stats

    def stats(self, request: Request) -> GenerationStats:
        """Measure the memory of a request that runs, or did."""
        self._core.settle()
        return self._core.stats(request) if request.outcome is None else request.outcome.stats

    def settled_events(self) -> list[TokenEvent]:
        """Take the events of a step that `stats` or `abort` has read; otherwise the next `step` returns them."""
        return self._core.take_settled()

    def session(self) -> Session:
        """Start a session, whose cache stays between turns."""
        return Session(self, self._core)

    def save(self, session: Session, folder: str | Path, overwrite: bool = False) -> None:
        """Write a session's compressed cache to a folder, for `load`; a failed write leaves no folder.

        Args:
            session: its last turn has finished.
            folder: a new or empty folder; each of several ranks writes a folder of its own there.
            overwrite: whether a cache that was saved there is replaced.
        Raises:
            FileExistsError: the folder holds other files.
            ValueError: the session is empty, or its policy keeps state outside the pages.
        """
        carried_cache.save(self._core, self.policy, self._inputs.sequence(session), Path(folder), overwrite)

    def load(self, folder: str | Path) -> Session:
        """Read a session that `save` has written; each call returns a session of its own.

        If there is no room for it, its next turn computes it again.

        Raises:
            FileNotFoundError: the folder holds no saved session.
            ValueError: it is damaged, or was saved with other weights, gates, policy, pages or ranks than the engine's.
        """
        session = Session(self, self._core)
        session.sequence = carried_cache.load(self._core, self.policy, Path(folder))
        return session

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
            keep: reduces the log-probabilities, [n, vocab], to what is returned. Whole vocabularies take gigabytes for
                a long continuation.
            after: tokens fed after each prompt has been compressed and before its continuation; None: nothing.
        Raises:
            ValueError: see `score`; or the lists have different lengths.
        """
        requests = self._inputs.scored(prompts, continuations, keep, after)
        generations = self._run_together(requests)
        return [
            Scoring(torch.cat(request.forced.kept), generation.stats)
            for request, generation in zip(requests, generations, strict=True)
        ]

    def _run_together(self, requests: Collection[Request], progress: bool | None = False) -> list[Generation]:
        """Start requests and run them to their end; none goes on if one cannot start."""
        try:
            for request in requests:
                self._start(request)
        except BaseException:
            self._core.abort(requests)
            raise
        self.run(requests, progress)
        return [request.generation for request in requests if request.generation is not None]

    def _submitted_here(self, request: Request) -> Request:
        """Return the request that was submitted, of a continuation too; another engine's has other blocks."""
        root = request.root or request
        if root.generation is None and root not in self._core:
            raise ValueError("the request was submitted to another engine: give it to that one")
        return root

    def _start(self, request: Request) -> None:
        self._inputs.check_can_start(request)
        self._core.add(request)

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
