"""What callers give becomes requests: prompts are encoded, and checked before anything is queued."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Collection
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dmc.compression.full_attention import context_length
from dmc.policies import CachePolicy
from dmc.runtime.engine_core import EngineCore
from dmc.runtime.options import SamplingParams
from dmc.runtime.request import Forced, ForcedRequest, Keep, Request, Sequence
from dmc.runtime.sampling import new_generator
from dmc.runtime.session import Session
from dmc.runtime.text_stream import TextStream
from dmc.special_tokens import encode_text, ends_of_text

TOKEN_IDS = TypeAdapter(list[int])


def encode(prompt: str | list[int], tokenizer: Any, vocab_size: int, begins_text: bool) -> list[int]:
    """Turn a prompt into token ids that the model knows.

    Args:
        prompt: text or token ids; a tensor or an array is one too.
        tokenizer: tokenizer for text, or None.
        vocab_size: ids must be below it.
        begins_text: whether special tokens come before a text, see `encode_text`.
    Raises:
        ValueError: the prompt is empty, text without a tokenizer, neither text nor token ids, or has unknown tokens.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("a text was given, but the engine has no tokenizer: pass tokenizer=, or token ids")
        prompt = encode_text(tokenizer, prompt, begins_text)
    given: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # one copy of a tensor, not one per token
    try:
        tokens = TOKEN_IDS.validate_python(given)
    except ValidationError:
        raise ValueError(f"a prompt or continuation is {given!r:.80}: expected a text, or token ids") from None
    if not tokens:
        raise ValueError("a prompt or continuation is empty: give at least one token")
    # an index out of range in the embedding makes the GPU unusable for this process
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise ValueError(
            f"tokens from {min(tokens)} to {max(tokens)} were given: the model knows 0 to {vocab_size - 1}"
        )
    return tokens


def _check_are_several(texts: Collection[Any]) -> None:
    """Raise TypeError if one text is given instead of a list."""
    if isinstance(texts, str):
        raise TypeError(f"prompts or continuations={texts!r:.80}: expected a list of texts, or of token ids")


class InputProcessor:
    """Makes requests; nothing is queued and no session grows.

    Args:
        model: causal LM.
        tokenizer: encodes texts; None: prompts are token ids.
        policy: the engine's policy.
        core: the requests in the engine.
    """

    def __init__(self, model: Any, tokenizer: Any, policy: CachePolicy | None, core: EngineCore) -> None:
        self._model, self._tokenizer, self._policy, self._core = model, tokenizer, policy, core
        self._vocab_size = model.get_input_embeddings().num_embeddings
        self._gates = copy.deepcopy(getattr(model.config, "compression", None))
        self._has_warned = False

    def request(
        self,
        prompt: str | list[int],
        params: SamplingParams | None,
        session: Session | None = None,
        context: str | list[int] | None = None,
    ) -> Request:
        """Check what `Engine.submit` was given, and make a request of it.

        Args:
            prompt: text or token ids.
            params: sampling parameters; None: the defaults.
            session: session whose next turn it is; None: a new sequence.
            context: prompt of an earlier turn, which is fed before; None: there is none.
        Raises:
            ValueError: see `Engine.submit`.
        """
        params = SamplingParams() if params is None else params
        for name, tokens in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            if max(tokens, default=0) >= self._vocab_size:
                raise ValueError(f"{name}={tokens!r:.80}: the model knows 0 to {self._vocab_size - 1}")
        if params.prompt_logprobs is not None and self._policy is not None:
            raise ValueError(
                f"prompt_logprobs={params.prompt_logprobs}: a policy compresses a prompt when it ends. Its tokens are "
                "predicted from the full cache: use `score`, or no policy"
            )
        if params.stop and self._tokenizer is None:
            raise ValueError(f"stop={params.stop!r} was given, but the engine has no tokenizer: pass tokenizer=")
        sequence = self.sequence(session, None if context is None else self.encode(context))
        if session is not None and params.n > 1:
            raise ValueError(f"n={params.n}: a session goes on from one continuation; give n=1")
        if not params.ignore_eos:
            ends = {*params.stop_token_ids, *ends_of_text(self._model.generation_config, self._tokenizer)}
            params = dataclasses.replace(params, stop_token_ids=tuple(ends))
        ids, stream = self.encode(prompt, begins_text=not sequence.tokens), None
        if self._tokenizer is not None:
            stream = TextStream(self._tokenizer, params.stop, [*sequence.tokens, *ids])
        generator = new_generator(params, self._core.cache.layout.ranks)
        request = Request(sequence, prompt=ids, params=params, generator=generator, text_stream=stream)
        self.check_can_start(request)
        return request

    def continued(
        self,
        prompts: Collection[str | list[int]],
        params: SamplingParams | list[SamplingParams] | None,
        after: Collection[list[int]] | None,
    ) -> list[Request]:
        """Make the requests that continue prompts; see `Engine.generate`."""
        _check_are_several(prompts)
        if not isinstance(params, list):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} sampling parameters for {len(prompts)} prompts: give one, or one for each")
        return [
            self.request(question or prompt, settings, context=prompt if question else None)
            for prompt, settings, question in zip(prompts, params, after or [[]] * len(prompts), strict=True)
        ]

    def scored(
        self,
        prompts: Collection[str | list[int] | Session],
        continuations: Collection[str | list[int]],
        keep: Keep,
        after: Collection[list[int]] | None,
    ) -> list[ForcedRequest]:
        """Make the requests that score continuations; see `Engine.score_with_stats`."""
        _check_are_several(prompts)
        _check_are_several(continuations)
        if len(prompts) != len(continuations):
            raise ValueError(f"{len(prompts)} prompts and {len(continuations)} continuations: give as many of each")
        requests = []
        for prompt, between, continuation in zip(prompts, after or [[]] * len(prompts), continuations, strict=True):
            tokens = self.encode(continuation, begins_text=False)
            if isinstance(prompt, Session):
                sequence = self.sequence(prompt)
                if not between and sequence.next_prompt == len(sequence.tokens):
                    raise ValueError("the session has been fed all of its tokens: give after= the next ones")
            else:
                sequence = self.sequence(None, self.encode(prompt))
            params = SamplingParams(max_new_tokens=len(tokens))
            requests.append(ForcedRequest(sequence, list(between), params, forced=Forced(tokens, keep)))
            self.check_can_start(requests[-1])
        return requests

    def sequence(self, session: Session | None, context: list[int] | None = None) -> Sequence:
        """Return the sequence that a request continues: a session's, or a new one that begins with a context."""
        if session is not None:
            if session.core is not self._core:
                raise ValueError("the session is another engine's: give it to that one")
            return session.idle_sequence()
        sequence = Sequence([], next_logit_position=0)
        if context is not None:
            sequence.add_prompt(context)
            sequence.next_prompt = len(sequence.tokens)
        return sequence

    def encode(self, text: str | list[int], begins_text: bool = True) -> list[int]:
        """See the function `encode`."""
        return encode(text, self._tokenizer, self._vocab_size, begins_text)

    def check_can_start(self, request: Request) -> None:
        """Raise ValueError if the request's session is busy, it can never fit the memory, or the gates are others."""
        if getattr(self._model.config, "compression", None) != self._gates:
            raise ValueError("model.compression has changed since this engine was made for it: make another engine")
        self._core.check_is_idle(request.sequence)
        num_tokens = len(request.sequence.tokens) + len(request.prompt) + request.params.max_new_tokens - 1
        self._check_fits(num_tokens, request.sequence)

    def _check_fits(self, num_tokens: int, sequence: Sequence) -> None:
        cache, limit = self._core.cache, context_length(self._model.config)
        blocks, base = cache.blocks_for(num_tokens), None if sequence.base is None else sequence.base.snapshot
        if base is not None:  # it holds what it holds
            blocks = min(blocks, cache.blocks_held(base) + cache.blocks_for(num_tokens - base.tokens_seen))
        if not cache.grows and blocks > cache.allocator.num_blocks:
            raise ValueError(
                f"a sequence of {num_tokens} tokens may need {blocks} blocks at CR {cache.expected_ratio:g}, and "
                f"memory= holds {cache.allocator.num_blocks}: give at least {blocks * cache.block_bytes} bytes, or a "
                "shorter one"
            )
        if num_tokens > limit and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"a sequence of up to {num_tokens} tokens exceeds the model's {limit} positions "
                "(max_position_embeddings): predictions beyond them are unreliable",
                stacklevel=2,
            )
