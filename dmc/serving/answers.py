"""What is answered from the engines of this process, in OpenAI's format: whole responses, and pieces of streams."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from prometheus_client import Metric

from dmc.results.policies import budget_name
from dmc.runtime import Engine, Generation, GenerationStats
from dmc.serving.requests import APIError, encoded, num_logprobs, prompts_of, read, sampling_of
from dmc.serving.worker import Job, News, Worker, stopped

CHAT_KINDS: Any = ((ChatCompletion, "chat.completion"), (ChatCompletionChunk, "chat.completion.chunk"))
LEAST_LOGPROB = -9999.0
"""Log-probability that OpenAI writes for an impossible token; JSON has no infinity."""
Told = tuple[int, float | None, dict[int, float]]
"""A token, its log-probability, and the most likely tokens with theirs."""
Update = tuple[int, str, list[Told], str | None]
"""An update of a choice: its index, new text, new tokens, and the finish reason."""


class Answer:
    """The response to one request, as JSON.

    Args:
        asked: body of the request.
        jobs: one job for each prompt.
        engine: engine that serves the model.
        events: queue of the jobs' token events, stats and results.
    """

    def __init__(self, asked: dict[str, Any], jobs: list[Job], engine: Engine, events: asyncio.Queue[News]) -> None:
        self._asked, self._jobs, self._engine, self._events = asked, jobs, engine, events
        self._is_chat, self._streams, self._echoes = "messages" in asked, asked.get("stream"), asked.get("echo")
        self._options, self._num_choices = asked.get("stream_options", {}), asked.get("n", 1)
        self._num_logprobs = num_logprobs(asked)
        self._offsets: dict[int, int] = {}
        self._num_generated = 0
        self._held: dict[int, GenerationStats] = {}
        self._ends: dict[int, Generation] = {}
        name = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._same: dict[str, Any] = {"id": name, "created": int(time.time()), "model": asked["model"]}

    async def pieces(self) -> AsyncIterator[str]:
        """Yield the whole response, or a server-sent event for every token as it is generated.

        Raises:
            APIError: a continuation has failed or was aborted.
        """
        begun: set[int] = set()
        while len(self._ends) < len(self._jobs):
            job, each = await self._events.get()
            if isinstance(each, Exception):
                raise each
            if isinstance(each, Generation):
                self._ends[job.index] = each
            elif isinstance(each, GenerationStats):
                self._held[job.index] = each
            else:
                self._num_generated += 1
                if not self._streams:
                    continue
                first = job.index * self._num_choices
                if job.index not in begun and (self._is_chat or self._echoes):
                    begun.add(job.index)
                    opening = await asyncio.to_thread(self._prompt, job)
                    for number in range(self._num_choices):
                        yield self._event((first + number, *opening, None))
                token: Told = each.token_id, each.logprob, each.top_logprobs or {}
                yield self._event((first + each.number, each.text, [token], each.finish_reason))
        if not self._streams:
            yield await asyncio.to_thread(self._whole)
            return
        if self._options.get("include_usage"):
            yield f"data: {self._write([], self._usage())}\n\n"
        yield "data: [DONE]\n\n"

    def _event(self, news: Update) -> str:
        usage = self._usage() if self._options.get("continuous_usage_stats") else None
        return f"data: {self._write([news], usage)}\n\n"

    def _whole(self) -> str:
        news: list[Update] = []
        for job in self._jobs:
            text, tokens = self._prompt(job)
            for one in (self._ends[job.index], *self._ends[job.index].alternatives):
                own = zip(one.token_ids, one.logprobs, one.top_logprobs or itertools.repeat({}), strict=False)
                news.append((len(news), text + (one.text or ""), [*tokens, *own], one.finish_reason))
        return self._write(news, self._usage())

    def _write(self, news: list[Update], usage: dict[str, Any] | None) -> str:
        build, kind = CHAT_KINDS[bool(self._streams)] if self._is_chat else (Completion, "text_completion")
        choices = [self._choice(*each) for each in news]
        return str(build.construct(**self._same, object=kind, choices=choices, usage=usage).model_dump_json())

    def _choice(self, index: int, text: str, tokens: list[Told], reason: str | None) -> dict[str, Any]:
        logprobs = None if self._num_logprobs is None else self._logprobs(index, tokens)
        choice = {"index": index, "finish_reason": reason, "logprobs": logprobs}
        if not self._is_chat:
            return choice | {"text": text}
        opens = not self._streams or not (tokens or reason)
        said = {"role": "assistant" if opens else None, "content": text}
        return choice | {"delta" if self._streams else "message": said}

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
        if self._options.get("continuous_usage_stats") and stats:
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
        """Return what is echoed of a prompt, as the tokenizer decodes it: text, and log-probabilities if requested."""
        if not self._echoes:
            return "", []
        text, request = str(self._engine.tokenizer.decode(job.prompt, skip_special_tokens=True)), job.request
        if self._num_logprobs is None:
            return text, []
        return text, [(job.prompt[0], None, {}), *request.forced.steps]

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


class LocalService:
    """Answers from the engines of a running worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self._began = worker, int(time.time())

    async def health(self) -> dict[str, Any]:
        """Tell that the engines run.

        Raises:
            APIError: they have stopped.
        """
        if self.worker.failure is not None:
            raise stopped()
        return {"status": "ok"}

    async def metrics(self) -> dict[str, list[Metric]]:
        """Return the metrics, without a replica's name."""
        return {"": self.worker.metrics.collect()}

    async def answer(self, path: str, body: bytes) -> AsyncIterator[str]:
        """Yield the JSON of an answer, or the server-sent events of a stream; closing it takes the request off.

        Raises:
            APIError: the request is wrong, or has failed.
        """
        if path.startswith("/v1/models"):
            name = path.removeprefix("/v1/models").removeprefix("/")
            listed = {"object": "list", "data": [self._about(each) for each in self.worker.engines]}
            yield json.dumps(self._about(name) if name else listed)
            return
        asked = await asyncio.to_thread(read, path, body)
        name = asked.setdefault("model", next(iter(self.worker.engines)))
        engine = self._engine(name)
        if path == "/tokenize":
            begins = asked.get("add_special_tokens", True)
            tokens = await asyncio.to_thread(encoded, asked["prompt"], engine, "prompt", begins)
            yield json.dumps({"tokens": tokens, "count": len(tokens), "max_model_len": self.worker.longest[name]})
        elif path == "/detokenize":
            tokens = asked["tokens"] and await asyncio.to_thread(encoded, asked["tokens"], engine, "tokens")
            yield json.dumps({"prompt": await asyncio.to_thread(engine.tokenizer.decode, tokens)})
        else:
            prompts = await asyncio.to_thread(prompts_of, asked, engine)
            params = [sampling_of(asked, len(each), engine, self.worker.longest[name]) for each in prompts]
            events: asyncio.Queue[News] = asyncio.Queue()
            watched = bool(asked.get("stream_options", {}).get("continuous_usage_stats"))
            own: Any = (events, asyncio.get_running_loop(), asked.get("question_tokens", 0), watched)
            jobs = [Job(name, prompts[index], each, index, *own) for index, each in enumerate(params)]
            self.worker.submit(jobs)
            try:
                async for piece in Answer(asked, jobs, engine, events).pieces():
                    yield piece
            finally:
                self.worker.abort(jobs)

    def _engine(self, name: str) -> Engine:
        if (engine := self.worker.engines.get(name)) is None:
            told = f"model {name!r:.100} is not served: expected one of {', '.join(self.worker.engines)}"
            raise APIError(404, told, "model", "model_not_found")
        return engine

    def _about(self, name: str) -> dict[str, Any]:
        engine = self._engine(name)
        method = "Full cache" if engine.cache.layout.compression is None else "Learned gates"
        if engine.policy is not None:
            method = f"{type(engine.policy).__name__}, budget {budget_name(engine.policy.budget)}"
        chats = bool(getattr(engine.tokenizer, "chat_template", None))
        more = {"max_model_len": self.worker.longest[name], "chat_template": chats, "about": method}
        return Model(id=name, object="model", created=self._began, owned_by="dmc").model_dump() | more
