"""Answers from the engines of this process, in OpenAI's format: full responses and the chunks of streams."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from typing import Any, NamedTuple

from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from prometheus_client import Metric

from dmc.results.policies import budget_name
from dmc.runtime import Engine, Generation, GenerationStats
from dmc.runtime.generation import Step
from dmc.runtime.text_stream import TextStream
from dmc.serving.logprobs import TokenLogprob, chat_logprobs, completion_logprobs, in_text
from dmc.serving.requests import (
    APIError,
    ChatRequest,
    DetokenizeRequest,
    ModelsRequest,
    TokenizeRequest,
    encode_prompt,
    encode_prompts,
    sampling_params,
)
from dmc.serving.token_texts import TokenTexts
from dmc.serving.worker import Job, JobEvent, Worker, engines_stopped

LINE_ENDS = {place: f"\\u{place:04x}" for place in (0x85, 0x2028, 0x2029)}
"""Escapes of what is no line end in a stream of events but in Python's `splitlines`, by which clients cut it."""


class Update(NamedTuple):
    """New text and tokens of a choice."""

    choice: int
    text: str
    tokens: list[TokenLogprob]
    """Empty where no log-probabilities are requested."""
    finish_reason: str | None
    begins: bool = True
    """Whether it is the first of its choice in a stream, or the only one."""


class Answer:
    """The response to one request, as JSON.

    Args:
        request: a completion or chat.
        jobs: one job for each prompt.
        engine: engine that serves the model.
        events: queue of the jobs' token events, stats and results.
        token_texts: of the engine's tokenizer.
    """

    def __init__(
        self, request: Any, jobs: list[Job], engine: Engine, events: asyncio.Queue[JobEvent], token_texts: TokenTexts
    ) -> None:
        self._request, self._jobs, self._engine, self._events = request, jobs, engine, events
        self._is_chat = isinstance(request, ChatRequest)
        self._token_texts = token_texts
        self._echo_lengths: dict[int, int] = {}
        self._num_generated = 0
        self._running_stats: dict[int, GenerationStats] = {}
        self._generations: dict[int, Generation] = {}
        self._header: dict[str, Any] = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model,
        }

    async def chunks(self) -> AsyncIterator[str]:
        """Yield the full response, or a server-sent event for every token as it is generated.

        Raises:
            APIError: a continuation has failed or was aborted.
        """
        request, started = self._request, set[int]()
        while len(self._generations) < len(self._jobs):
            job, event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Generation):
                self._generations[job.index] = event
                continue
            if isinstance(event, GenerationStats):
                self._running_stats[job.index] = event
                continue
            self._num_generated += 1
            if not request.stream:
                continue
            first_choice = job.index * request.n
            if job.index not in started and (self._is_chat or request.echo):
                started.add(job.index)
                echo = await asyncio.to_thread(self._echo, job)
                for number in range(request.n):
                    yield self._event(Update(first_choice + number, *echo, None))
            try:
                text, step = event.text, (event.token_id, event.logprob, event.top_logprobs or {})
                tokens = self._new_tokens(job, event.number, [step], event.index)
            except Exception as error:  # of the tokenizer
                raise APIError(500, f"the request has failed: {error!r}", None, "generation_failed") from error
            update = Update(first_choice + event.number, text, tokens, event.finish_reason, begins=False)
            yield self._event(update)
        if not request.stream:
            yield await asyncio.to_thread(self._full_response)
            return
        if request.stream_options.include_usage:
            yield f"data: {self._write([], self._usage())}\n\n"
        yield "data: [DONE]\n\n"

    def _event(self, update: Update) -> str:
        usage = self._usage() if self._request.stream_options.continuous_usage_stats else None
        return f"data: {self._write([update], usage)}\n\n"

    def _full_response(self) -> str:
        updates: list[Update] = []
        for job in self._jobs:
            text, tokens = self._echo(job)
            best = self._generations[job.index]
            for number, generation in enumerate((best, *best.alternatives)):
                top: Any = generation.top_logprobs or itertools.repeat({})
                steps = zip(generation.token_ids, generation.logprobs, top, strict=False)
                new = self._new_tokens(job, number, steps)
                whole = text + (generation.text or "")
                updates.append(Update(len(updates), whole, [*tokens, *new], generation.finish_reason))
        return self._write(updates, self._usage())

    def _write(self, updates: list[Update], usage: dict[str, Any] | None) -> str:
        response: Any = Completion
        name = "text_completion"
        if self._is_chat:
            response, name = ChatCompletion, "chat.completion"
            if self._request.stream:
                response, name = ChatCompletionChunk, "chat.completion.chunk"
        choices = [self._choice(update) for update in updates]
        content = response.construct(**self._header, object=name, choices=choices, usage=usage).model_dump_json()
        return str(content.translate(LINE_ENDS))

    def _choice(self, update: Update) -> dict[str, Any]:
        logprobs = None
        if self._request.num_logprobs is not None:
            write = chat_logprobs if self._is_chat else completion_logprobs
            logprobs = write(update.tokens, self._token_texts)
        choice = {"index": update.choice, "finish_reason": update.finish_reason, "logprobs": logprobs}
        if not self._is_chat:
            return choice | {"text": update.text}
        message = {"role": "assistant" if update.begins else None, "content": update.text}
        return choice | {"delta" if self._request.stream else "message": message}

    def _usage(self) -> dict[str, Any]:
        """Count tokens and cache entries; of every layer and KV head where the client asks for them."""
        if len(self._generations) < len(self._jobs):
            stats = [*self._running_stats.values()]
        else:
            best = [self._generations[job.index] for job in self._jobs]
            stats = [generation.stats for first in best for generation in (first, *first.alternatives)]
        entries = sum(int(one.slots.sum()) for one in stats)
        full_entries = sum(one.tokens_seen * one.slots.numel() for one in stats)
        dmc_stats: dict[str, Any] = {
            "achieved_ratio": round(full_entries / entries, 4) if entries else None,
            "slots": entries,
            "bytes_used": sum(one.bytes_used for one in stats),
            "bytes_allocated": sum(one.bytes_allocated for one in stats),
        }
        if self._request.stream_options.continuous_usage_stats and stats:
            dmc_stats |= {"slots_by_head": stats[0].slots.tolist(), "tokens_seen": stats[0].tokens_seen}
        num_prompt_tokens = sum(job.num_carried + len(job.prompt) for job in self._jobs)
        num_cached = sum(job.request.sequence.num_reused for job in self._jobs if job.request is not None)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_generated,
            "total_tokens": num_prompt_tokens + self._num_generated,
            "prompt_tokens_details": {"cached_tokens": num_cached},
            "x-dmc-stats": dmc_stats,
        }

    def _echo(self, job: Job) -> tuple[str, list[TokenLogprob]]:
        """Return the echoed prompt, as the tokenizer decodes it: text, and log-probabilities if requested."""
        if not self._request.echo:
            return "", []
        stream = TextStream(self._engine.tokenizer, prompt=job.request.sequence.tokens[: job.num_carried])
        for token in job.prompt:
            stream.add(token)
        self._echo_lengths[job.index] = len(text := stream.text())
        if self._request.num_logprobs is None:
            return text, []
        return text, in_text([(job.prompt[0], None, {}), *job.request.forced.steps], self._token_texts, stream)

    def _new_tokens(self, job: Job, number: int, steps: Iterable[Step], first: int = 0) -> list[TokenLogprob]:
        """Place generated tokens of a choice in its text, if log-probabilities are requested."""
        if self._request.num_logprobs is None:
            return []
        stream = job.request.branches[number].text_stream
        return in_text(steps, self._token_texts, stream, first, self._echo_lengths.get(job.index, 0))


class LocalService:
    """Answers from the engines of a running worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self._created = worker, int(time.time())
        self._texts: dict[str, TokenTexts] = {}

    async def health(self) -> dict[str, Any]:
        """Return that the engines run.

        Raises:
            APIError: they have stopped.
        """
        if self.worker.failure is not None:
            raise engines_stopped()
        return {"status": "ok"}

    async def metrics(self) -> dict[str, list[Metric]]:
        """Return the metrics, without a replica's name."""
        return {"": self.worker.metrics.collect()}

    async def answer(self, request: Any) -> AsyncIterator[str]:
        """Yield the JSON of an answer, or the server-sent events of a stream; closing it aborts the request.

        Raises:
            APIError: the request is wrong, or has failed.
        """
        if isinstance(request, ModelsRequest):
            models = {"object": "list", "data": [self._about(model) for model in self.worker.engines]}
            yield json.dumps(self._about(request.model) if request.model else models)
            return
        model = next(iter(self.worker.engines)) if request.model is None else request.model
        engine, max_model_len = self._engine(model), self.worker.max_model_len(model)
        if isinstance(request, TokenizeRequest):
            special = request.add_special_tokens
            tokens = await asyncio.to_thread(encode_prompt, request.prompt, engine, "prompt", special)
            yield json.dumps({"tokens": tokens, "count": len(tokens), "max_model_len": max_model_len})
            return
        if isinstance(request, DetokenizeRequest):
            tokens = request.tokens and await asyncio.to_thread(encode_prompt, request.tokens, engine, "tokens")
            yield json.dumps({"prompt": await asyncio.to_thread(engine.tokenizer.decode, tokens)})
            return
        num_carried, max_model_len = self._num_carried(request), self.worker.max_model_len(model, request.cache_id)
        prompts = await asyncio.to_thread(encode_prompts, request, engine)
        lengths = [num_carried + len(prompt) for prompt in prompts]
        params = [sampling_params(request, length, engine, max_model_len) for length in lengths]
        events: asyncio.Queue[JobEvent] = asyncio.Queue()
        shared: Any = {
            "events": events,
            "loop": asyncio.get_running_loop(),
            "question_tokens": request.question_tokens,
            "cache_id": request.cache_id,
            "num_carried": num_carried,
            "reports_cache": request.stream_options.continuous_usage_stats,
        }
        jobs = [Job(model, prompts[index], params[index], index, **shared) for index in range(len(prompts))]
        self.worker.submit(jobs)
        try:
            async for chunk in Answer(request, jobs, engine, events, self._token_texts(model)).chunks():
                yield chunk
        finally:
            self.worker.abort(jobs)

    def _engine(self, model: str) -> Engine:
        if (engine := self.worker.engines.get(model)) is None:
            message = f"model {model!r:.100} is not served: expected one of {', '.join(self.worker.engines)}"
            raise APIError(404, message, "model", "model_not_found")
        return engine

    def _token_texts(self, model: str) -> TokenTexts:
        if model not in self._texts:
            self._texts[model] = TokenTexts(self.worker.engines[model].tokenizer)
        return self._texts[model]

    def _num_carried(self, request: Any) -> int:
        """Return the number of tokens of the carried cache that a request names; 0: it names none.

        Raises:
            APIError: there is no such cache, or the request cannot go on from one.
        """
        if request.cache_id is None:
            return 0
        caches = self.worker.caches[request.model]
        if (cache := caches.get(request.cache_id)) is None:
            message = f"{request.model!r} has no cache {request.cache_id!r:.100}: "
            message += f"expected one of {', '.join(caches)}" if caches else "none was loaded, see caches="
            raise APIError(404, message, "cache_id", "cache_not_found")
        for name, expected in (("n", 1), ("question_tokens", 0)):
            if (value := getattr(request, name)) != expected:
                raise APIError(400, f"{name}={value}: with a cache_id expected {expected}", name)
        return cache.num_tokens

    def _about(self, model: str) -> dict[str, Any]:
        engine = self._engine(model)
        method = "Full cache" if engine.cache.layout.compression is None else "Learned gates"
        if engine.policy is not None:
            method = f"{type(engine.policy).__name__}, budget {budget_name(engine.policy.budget)}"
        return Model(id=model, object="model", created=self._created, owned_by="dmc").model_dump() | {
            "max_model_len": self.worker.max_model_len(model),
            "chat_template": bool(getattr(engine.tokenizer, "chat_template", None)),
            "about": method,
            "caches": {name: cache.num_tokens for name, cache in self.worker.caches[model].items()},
        }
