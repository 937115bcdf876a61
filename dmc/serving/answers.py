"""Answers of the engine in OpenAI's words: whole ones, and the pieces of streams."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator
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
from dmc.serving.requests import APIError, Asked, ChatAsked, CompletionAsked, out_of_range
from dmc.serving.worker import Job

LEAST_LOGPROB = -9999.0
"""What OpenAI writes for a token that cannot come; JSON knows no infinity."""
Told = tuple[int, float | None, dict[int, float]]
"""A token, its log-probability and those of the most likely ones."""


class Answer:
    """What one request is answered, as JSON.

    Args:
        asked: the request.
        jobs: one for each prompt.
        engine: that continues them.
        news: where the jobs' events, stats and ends come from.
    """

    def __init__(self, asked: Asked, jobs: list[Job], engine: Engine, news: asyncio.Queue[tuple[Job, Any]]) -> None:
        self._asked, self._jobs, self._engine, self._news = asked, jobs, engine, news
        self._is_chat = isinstance(asked, ChatAsked)
        self._echoes = isinstance(asked, CompletionAsked) and asked.echo
        self._offsets: dict[int, int] = {}
        self._num_generated = 0
        self._held: dict[int, GenerationStats] = {}
        self._ends: dict[int, Generation] = {}
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    async def whole(self) -> str:
        """Wait for all continuations.

        Raises:
            APIError: one of the prompts could not be continued to its end.
        """
        async for _ in self._events():
            self._num_generated += 1
        return await asyncio.to_thread(self._whole)

    async def pieces(self) -> AsyncIterator[str]:
        """Tell every token as it comes.

        Raises:
            APIError: see `whole`.
        """
        options, n = self._asked.stream_options, self._asked.n
        begun: set[int] = set()
        async for job, event in self._events():
            if job.index not in begun and (self._is_chat or self._echoes):
                begun.add(job.index)
                opening = self._prompt(job) if self._echoes else ("", [])
                for index in range(job.index * n, (job.index + 1) * n):
                    yield self._piece([self._choice(index, *opening, None, ChoiceDelta(role="assistant"))])
            self._num_generated += 1
            usage = self._usage([*self._held.values()], slots=True) if options.continuous_usage_stats else None
            tokens: list[Told] = [(event.token_id, event.logprob, event.top_logprobs or {})]
            told = self._ending(event.text, tokens, event.finish_reason)
            yield self._piece([self._choice(job.index * n + event.number, *told, ChoiceDelta())], usage)
        if options.include_usage:
            stats = [each.stats for one in self._generations() for each in one]
            yield self._piece([], self._usage(stats, slots=options.continuous_usage_stats))

    async def _events(self) -> AsyncIterator[tuple[Job, TokenEvent]]:
        while len(self._ends) < len(self._jobs):
            job, each = await self._news.get()
            if isinstance(each, TokenEvent):
                yield job, each
            elif isinstance(each, GenerationStats):
                self._held[job.index] = each
            elif isinstance(each, ValueError):
                raise out_of_range(each)
            elif isinstance(each, Exception):
                raise APIError(500, f"the request could not go on: {each}", None, "generation_failed")
            elif each.finish_reason == "abort":
                raise APIError(500, "the request was taken off", None, "generation_failed")
            else:
                self._ends[job.index] = each

    def _generations(self) -> list[list[Generation]]:
        return [[self._ends[job.index], *self._ends[job.index].alternatives] for job in self._jobs]

    def _whole(self) -> str:
        choices: list[Any] = []
        for job, generations in zip(self._jobs, self._generations(), strict=True):
            for each in generations:
                top = each.top_logprobs or [{}] * len(each.token_ids)
                told: list[Told] = list(zip(each.token_ids, each.logprobs, top, strict=True))
                text, tokens, reason = self._ending(each.text or "", told, each.finish_reason)
                if self._echoes:
                    prompt, tokens_of_prompt = self._prompt(job)
                    text, tokens = prompt + text, tokens_of_prompt + tokens
                choices.append(self._choice(len(choices), text, tokens, reason))
        usage = self._usage([each.stats for one in self._generations() for each in one])
        if self._is_chat:
            return self._written(ChatCompletion, "chat.completion", choices, usage)
        return self._written(Completion, "text_completion", choices, usage)

    def _piece(self, choices: list[Any], usage: CompletionUsage | None = None) -> str:
        if self._is_chat:
            return self._written(ChatCompletionChunk, "chat.completion.chunk", choices, usage)
        return self._written(Completion, "text_completion", choices, usage)

    def _written(self, build: Any, kind: str, choices: list[Any], usage: CompletionUsage | None) -> str:
        same = {"id": self._id, "created": self._created, "model": self._asked.model}
        return str(build.construct(**same, object=kind, choices=choices, usage=usage).model_dump_json())

    def _ending(self, text: str, tokens: list[Told], reason: str | None) -> tuple[str, list[Told], str | None]:
        """Hide the one token that is generated where none was asked for."""
        return ("", [], "length") if self._asked.max_tokens == 0 else (text, tokens, reason)

    def _choice(
        self, index: int, text: str, tokens: list[Told], reason: str | None, delta: ChoiceDelta | None = None
    ) -> Any:
        told: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        if self._asked.num_logprobs is not None:
            told["logprobs"] = self._chat_logprobs(tokens) if self._is_chat else self._logprobs(index, tokens)
        if not self._is_chat:
            return CompletionChoice.construct(text=text, **told)
        if delta is not None:
            return ChunkChoice.construct(delta=delta.model_copy(update={"content": text}), **told)
        return ChatChoice.construct(message=ChatCompletionMessage(role="assistant", content=text), **told)

    def _usage(self, stats: list[GenerationStats], slots: bool = False) -> CompletionUsage:
        """Count tokens, and what the cache holds of them; `slots`: of every layer and KV head."""
        entries = sum(int(each.slots.sum()) for each in stats)
        seen = sum(each.tokens_seen * each.slots.numel() for each in stats)
        told: dict[str, Any] = {
            "achieved_ratio": round(seen / entries, 4) if entries else None,
            "slots": entries,
            "bytes_used": sum(each.bytes_used for each in stats),
            "bytes_allocated": sum(each.bytes_allocated for each in stats),
        }
        if slots and stats:
            told |= {"slots_by_head": stats[0].slots.tolist(), "tokens_seen": stats[0].tokens_seen}
        prompt = sum(len(job.prompt) for job in self._jobs)
        generated = 0 if self._asked.max_tokens == 0 else self._num_generated
        reused = sum(job.request.sequence.num_reused for job in self._jobs if job.request is not None)
        return CompletionUsage(
            prompt_tokens=prompt,
            completion_tokens=generated,
            total_tokens=prompt + generated,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=reused),
            **{"x-dmc-stats": told},  # type: ignore[arg-type]
        )

    def _prompt(self, job: Job) -> tuple[str, list[Told]]:
        """Tell a prompt as the tokenizer reads it, and how likely its tokens are if that was asked."""
        text, request = str(self._engine.tokenizer.decode(job.prompt, skip_special_tokens=True)), job.request
        assert request is not None
        if self._asked.num_logprobs is None:
            return text, []
        likely = zip(job.prompt[1:], request.prompt_logprobs, request.prompt_top_logprobs, strict=True)
        return text, [(job.prompt[0], None, {}), *likely]

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
            top = [TopLogprob(**self._named(each, value)) for each, value in likely.items()]
            content.append(ChatCompletionTokenLogprob(**self._named(token, logprob or 0.0), top_logprobs=top))
        return ChoiceLogprobs(content=content, refusal=None)

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "bytes": list(text.encode("utf-8", "replace")), "logprob": _finite(logprob)}

    def _text(self, token: int) -> str:
        return str(self._engine.tokenizer.decode([token]))


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
