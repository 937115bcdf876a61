"""Answers of the engine in OpenAI's words: whole ones, and the pieces of streams."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterable
from typing import Any

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion import Choice as ChatChoice
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import PromptTokensDetails

from dmc.runtime import Engine, Generation, GenerationStats, TokenEvent
from dmc.serving.requests import Asked, ChatAsked, CompletionAsked
from dmc.serving.worker import Job

LEAST_LOGPROB = -9999.0
"""What OpenAI writes for a token that cannot come; JSON knows no infinity."""
Told = tuple[int, float | None, dict[int, float]]
"""A token, its log-probability and those of the most likely ones."""


class Answer:
    """What one request is answered.

    Args:
        asked: the request.
        jobs: one for each prompt.
        engine: that continues them.
    """

    def __init__(self, asked: Asked, jobs: list[Job], engine: Engine) -> None:
        self.asked, self.jobs, self._engine = asked, jobs, engine
        self._is_chat = isinstance(asked, ChatAsked)
        self._echoes = isinstance(asked, CompletionAsked) and asked.echo
        self._offsets: dict[int, int] = {}
        self._same = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": asked.model,
        }

    def whole(self, generations: list[Generation]) -> dict[str, Any]:
        """Put the answer together, of one generation for each prompt."""
        choices: list[Any] = []
        for job, generation in zip(self.jobs, generations, strict=True):
            for each in (generation, *generation.alternatives):
                text, reason = each.text or "", each.finish_reason
                tokens: list[Told] = list(
                    zip(each.token_ids, each.logprobs, each.top_logprobs or [{}] * len(each.token_ids), strict=True)
                )
                if self.asked.max_tokens == 0:
                    text, reason, tokens = "", "length", []
                if self._echoes:
                    text, tokens = self.prompt_text(job) + text, self._of_prompt(job) + tokens
                choices.append(self._choice(len(choices), text, tokens, reason))
        lengths = [len(each.token_ids) for one in generations for each in (one, *one.alternatives)]
        usage = self.usage(lengths, generations)
        build: Any = ChatCompletion if self._is_chat else Completion
        kind = "chat.completion" if self._is_chat else "text_completion"
        return build.construct(**self._same, object=kind, choices=choices, usage=usage).model_dump(mode="json")

    def piece(self, job: Job, event: TokenEvent, usage: CompletionUsage | None) -> dict[str, Any]:
        """Write what one token brings to a stream."""
        index = job.index * self.asked.n + event.number
        tokens: list[Told] = [(event.token_id, event.logprob, event.top_logprobs or {})]
        return self._chunk([self._choice(index, event.text, tokens, event.finish_reason, streams=True)], usage)

    def beginning(self, job: Job) -> list[dict[str, Any]]:
        """Write what comes before the first token: a chat's role, or the prompt that is echoed."""
        found = []
        for index in range(job.index * self.asked.n, (job.index + 1) * self.asked.n):
            if self._is_chat:
                delta = ChoiceDelta(role="assistant", content="")
                found.append(self._chunk([ChunkChoice(index=index, delta=delta, finish_reason=None)], None))
            elif self._echoes:
                choice = self._choice(index, self.prompt_text(job), self._of_prompt(job), None, streams=True)
                found.append(self._chunk([choice], None))
        return found

    def last(self, usage: CompletionUsage) -> dict[str, Any]:
        """Write the piece with the usage alone."""
        return self._chunk([], usage)

    def usage(
        self, lengths: list[int], held: Iterable[Generation | GenerationStats], slots: bool = False
    ) -> CompletionUsage:
        """Count tokens, and what the cache holds of them.

        Args:
            lengths: of the continuations so far.
            held: one for each prompt, maybe with further continuations.
            slots: whether to tell the entries of every layer and KV head.
        """
        every: list[GenerationStats] = []
        for each in held:
            found = [each, *each.alternatives] if isinstance(each, Generation) else [each]
            every += [one.stats if isinstance(one, Generation) else one for one in found]
        entries = sum(int(stats.slots.sum()) for stats in every)
        seen = sum(stats.tokens_seen * stats.slots.numel() for stats in every)
        told: dict[str, Any] = {
            "achieved_ratio": round(seen / entries, 4) if entries else None,
            "slots": entries,
            "bytes_used": sum(stats.bytes_used for stats in every),
            "bytes_allocated": sum(stats.bytes_allocated for stats in every),
        }
        if slots and every:
            told |= {"slots_by_head": every[0].slots.tolist(), "tokens_seen": every[0].tokens_seen}
        prompt = sum(len(job.prompt) for job in self.jobs)
        generated = 0 if self.asked.max_tokens == 0 else sum(lengths)
        requests = [job.request for job in self.jobs if job.request is not None]
        reused = PromptTokensDetails(cached_tokens=sum(each.sequence.num_reused for each in requests))
        return CompletionUsage(
            prompt_tokens=prompt,
            completion_tokens=generated,
            total_tokens=prompt + generated,
            prompt_tokens_details=reused,
            **{"x-dmc-stats": told},  # type: ignore[arg-type]
        )

    def prompt_text(self, job: Job) -> str:
        """Write a prompt as the tokenizer reads it."""
        return str(self._engine.tokenizer.decode(job.prompt, skip_special_tokens=True))

    def _chunk(self, choices: list[Any], usage: CompletionUsage | None) -> dict[str, Any]:
        build: Any = ChatCompletionChunk if self._is_chat else Completion
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return build.construct(**self._same, object=kind, choices=choices, usage=usage).model_dump(mode="json")

    def _choice(self, index: int, text: str, tokens: list[Told], reason: str | None, streams: bool = False) -> Any:
        logprobs = None
        if self.asked.num_logprobs is not None:
            logprobs = self._chat_logprobs(tokens) if self._is_chat else self._logprobs(index, tokens)
        if not self._is_chat:
            return CompletionChoice.construct(index=index, text=text, logprobs=logprobs, finish_reason=reason)
        if streams:
            delta = ChoiceDelta(content=text)
            return ChunkChoice.construct(index=index, delta=delta, logprobs=logprobs, finish_reason=reason)
        message = ChatCompletionMessage(role="assistant", content=text)
        return ChatChoice.construct(index=index, message=message, logprobs=logprobs, finish_reason=reason)

    def _of_prompt(self, job: Job) -> list[Told]:
        request = job.request
        assert request is not None
        first: Told = (job.prompt[0], None, {})
        return [first, *zip(job.prompt[1:], request.prompt_logprobs, request.prompt_top_logprobs, strict=False)]

    def _logprobs(self, index: int, tokens: list[Told]) -> Logprobs:
        texts = [self._text(token) for token, _, _ in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(text)
        top: list[Any] = []
        for token, logprob, likely in tokens:
            named: dict[str, float] = {}
            for each, value in [*likely.items(), (token, logprob)]:
                if value is not None:  # of tokens with one text the most likely
                    named[self._text(each)] = max(_finite(value), named.get(self._text(each), -math.inf))
            top.append(named if logprob is not None else None)
        values: list[Any] = [None if logprob is None else _finite(logprob) for _, logprob, _ in tokens]
        return Logprobs.construct(tokens=texts, token_logprobs=values, top_logprobs=top, text_offset=offsets)

    def _chat_logprobs(self, tokens: list[Told]) -> ChoiceLogprobs:
        content = []
        for token, logprob, likely in tokens:
            top = [TopLogprob(**self._named(each), logprob=_finite(value)) for each, value in likely.items()]
            value = _finite(logprob or 0.0)
            content.append(ChatCompletionTokenLogprob(**self._named(token), logprob=value, top_logprobs=top))
        return ChoiceLogprobs(content=content, refusal=None)

    def _named(self, token: int) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "bytes": list(text.encode("utf-8", "replace"))}

    def _text(self, token: int) -> str:
        return str(self._engine.tokenizer.decode([token]))


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
