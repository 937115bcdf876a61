"""Responses in OpenAI's format: whole ones, and the pieces of streams."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from dmc.runtime import Engine, Generation, GenerationStats, TokenEvent
from dmc.serving.requests import APIError, Asked, ChatAsked, out_of_range
from dmc.serving.worker import Job

CHAT_KINDS: Any = ((ChatCompletion, "chat.completion"), (ChatCompletionChunk, "chat.completion.chunk"))
LEAST_LOGPROB = -9999.0
"""Log-probability that OpenAI writes for an impossible token; JSON has no infinity."""
Told = tuple[int, float | None, dict[int, float]]
"""A token, its log-probability, and the most likely tokens with theirs."""
News = tuple[int, str, list[Told], str | None]
"""An update of a choice: its index, new text, new tokens, and the finish reason."""


class Answer:
    """The response to one request, as JSON.

    Args:
        asked: body of the request.
        jobs: one job for each prompt.
        engine: engine that serves the model.
        events: queue of the jobs' token events, stats and results.
    """

    def __init__(self, asked: Asked, jobs: list[Job], engine: Engine, events: asyncio.Queue[tuple[Job, Any]]) -> None:
        self._asked, self._jobs, self._engine, self._events = asked, jobs, engine, events
        self._is_chat, self._echoes = isinstance(asked, ChatAsked), getattr(asked, "echo", False)
        self._offsets: dict[int, int] = {}
        self._num_generated = 0
        self._held: dict[int, GenerationStats] = {}
        self._ends: dict[int, Generation] = {}
        name = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._same: dict[str, Any] = {"id": name, "created": int(time.time()), "model": asked.model}

    async def whole(self) -> str:
        """Wait for all continuations and return the whole response.

        Raises:
            APIError: a continuation has failed or was aborted.
        """
        choices: dict[int, News] = {}
        async for index, text, tokens, reason in self._news():
            _, text_before, tokens_before, _ = choices.get(index, (index, "", [], None))
            tokens_before += tokens
            choices[index] = index, text_before + text, tokens_before, reason
        return await asyncio.to_thread(self._write, [choices[index] for index in sorted(choices)], self._usage())

    async def pieces(self) -> AsyncIterator[str]:
        """Yield a piece for every token as it is generated.

        Raises:
            APIError: see `whole`.
        """
        options = self._asked.stream_options
        async for news in self._news():
            yield self._write([news], self._usage() if options.continuous_usage_stats else None, is_piece=True)
        if options.include_usage:
            yield self._write([], self._usage(), is_piece=True)

    async def _news(self) -> AsyncIterator[News]:
        begun: set[int] = set()
        while len(self._ends) < len(self._jobs):
            job, each = await self._events.get()
            if isinstance(each, TokenEvent):
                first = job.index * self._asked.n
                if job.index not in begun and (self._is_chat or self._echoes):
                    begun.add(job.index)
                    opening = await asyncio.to_thread(self._prompt, job) if self._echoes else ("", [])
                    for number in range(self._asked.n):
                        yield first + number, *opening, None
                if self._asked.max_tokens == 0:  # the engine generates at least one token
                    yield first + each.number, "", [], "length"
                else:
                    self._num_generated += 1
                    token: Told = each.token_id, each.logprob, each.top_logprobs or {}
                    yield first + each.number, each.text, [token], each.finish_reason
            elif isinstance(each, GenerationStats):
                self._held[job.index] = each
            elif isinstance(each, ValueError):
                raise out_of_range(each)
            elif isinstance(each, Exception) or each.finish_reason == "abort":
                why = f"the request has failed: {each}" if isinstance(each, Exception) else "the request was aborted"
                raise APIError(500, why, None, "generation_failed")
            else:
                self._ends[job.index] = each

    def _write(self, news: list[News], usage: dict[str, Any] | None, is_piece: bool = False) -> str:
        choices = [self._choice(*each, is_piece) for each in news]
        build, kind = CHAT_KINDS[is_piece] if self._is_chat else (Completion, "text_completion")
        return str(build.construct(**self._same, object=kind, choices=choices, usage=usage).model_dump_json())

    def _choice(self, index: int, text: str, tokens: list[Told], reason: str | None, is_piece: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        if self._asked.num_logprobs is not None:
            choice["logprobs"] = self._logprobs(index, tokens)
        if not self._is_chat:
            return choice | {"text": text}
        opens = not is_piece or not (tokens or reason)
        said = {"role": "assistant" if opens else None, "content": text}
        return choice | {"delta" if is_piece else "message": said}

    def _usage(self) -> dict[str, Any]:
        """Count tokens and cache entries; of every layer and KV head where the client watches them."""
        ends = [each.stats for _, end in sorted(self._ends.items()) for each in (end, *end.alternatives)]
        stats = [*self._held.values()] if len(self._ends) < len(self._jobs) else ends
        entries = sum(int(each.slots.sum()) for each in stats)
        seen = sum(each.tokens_seen * each.slots.numel() for each in stats)
        told: dict[str, Any] = {
            "achieved_ratio": round(seen / entries, 4) if entries else None,
            "slots": entries,
            "bytes_used": sum(each.bytes_used for each in stats),
            "bytes_allocated": sum(each.bytes_allocated for each in stats),
        }
        if self._asked.stream_options.continuous_usage_stats and stats:
            told |= {"slots_by_head": stats[0].slots.tolist(), "tokens_seen": stats[0].tokens_seen}
        prompt = sum(len(job.prompt) for job in self._jobs)
        reused = sum(job.request.sequence.num_reused for job in self._jobs if job.request is not None)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._num_generated,
            "total_tokens": prompt + self._num_generated,
            "prompt_tokens_details": {"cached_tokens": reused},
            "x-dmc-stats": told,
        }

    def _prompt(self, job: Job) -> tuple[str, list[Told]]:
        """Return a prompt's text as the tokenizer decodes it, and its tokens' log-probabilities if requested."""
        text, request = str(self._engine.tokenizer.decode(job.prompt, skip_special_tokens=True)), job.request
        if self._asked.num_logprobs is None:
            return text, []
        likely = zip(job.prompt[1:], request.prompt_logprobs, request.prompt_top_logprobs, strict=True)
        return text, [(job.prompt[0], None, {}), *likely]

    def _logprobs(self, index: int, tokens: list[Told]) -> dict[str, Any]:
        named = [(self._named(token, own), [self._named(*one) for one in top.items()]) for token, own, top in tokens]
        if self._is_chat:
            return {"content": [one | {"top_logprobs": top} for one, top in named], "refusal": None}
        ends = [*itertools.accumulate((len(one["token"]) for one, _ in named), initial=self._offsets.get(index, 0))]
        self._offsets[index] = ends[-1]
        likely: list[Any] = []
        for one, top in named:  # of tokens with the same text the most likely one remains
            ranked = sorted([one, *top], key=lambda each: each["logprob"]) if one["logprob"] is not None else None
            likely.append(ranked and {each["token"]: each["logprob"] for each in ranked})
        return {
            "tokens": [one["token"] for one, _ in named],
            "token_logprobs": [one["logprob"] for one, _ in named],
            "top_logprobs": likely,
            "text_offset": ends[:-1],
        }

    def _named(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = str(self._engine.tokenizer.decode([token]))
        least = None if logprob is None else max(logprob, LEAST_LOGPROB)
        return {"token": text, "bytes": [*text.encode("utf-8", "replace")], "logprob": least}
