"""The routes: OpenAI's, the tokenizer's, health, metrics and a page."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from openai.types import Model
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from dmc.policies.from_config import budget_name
from dmc.runtime import Engine, Generation, GenerationStats, TokenEvent
from dmc.serving import requests
from dmc.serving.answers import Answer
from dmc.serving.requests import APIError, Asked, ChatAsked, CompletionAsked
from dmc.serving.worker import Busy, Job, Worker

logger = logging.getLogger(__name__)
PAGE = Path(__file__).with_name("page.html")
OPEN = ("/", "/health")
"""What needs no key."""
Value = TypeVar("Value")


@dataclass(frozen=True)
class Limits:
    """What clients may ask for."""

    max_body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    """A body that has not come by then never comes."""
    log_prompts: bool = False


class ToTokenize(BaseModel):
    """Body of /tokenize."""

    model_config = ConfigDict(strict=True)
    prompt: str
    model: str | None = None
    add_special_tokens: bool = True


class ToDetokenize(BaseModel):
    """Body of /detokenize."""

    model_config = ConfigDict(strict=True)
    tokens: list[int]
    model: str | None = None


def make_app(worker: Worker, keys: tuple[str, ...] = (), limits: Limits | None = None) -> FastAPI:
    """Build the application around a worker that runs.

    Args:
        worker: steps the engines.
        keys: one of which every request must bear; none: nobody is asked.
        limits: on bodies, and whether prompts are logged.
    """

    def check_key(request: Request) -> None:
        if keys and request.url.path not in OPEN and not _bears(request, keys):
            raise APIError(401, "the key is missing or wrong: send Authorization: Bearer KEY", None, "invalid_api_key")

    check = [Depends(check_key)]
    app = FastAPI(title="dmc", docs_url=None, redoc_url=None, openapi_url=None, dependencies=check)
    bounds, began = limits or Limits(), int(time.time())
    models = [Model(id=name, object="model", created=began, owned_by="dmc") for name in worker.engines]

    @app.exception_handler(APIError)
    async def tell(request: Request, error: APIError) -> JSONResponse:
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def tell_route(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}".encode("ascii", "replace").decode()
        return JSONResponse(APIError(error.status_code, message).body(), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def tell_defect(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(APIError(500, f"the server has failed: {type(error).__name__}").body(), 500)

    def engine_of(name: str | None) -> Engine:
        engine = next(iter(worker.engines.values())) if name is None else worker.engines.get(name)
        if engine is None:
            known = ", ".join(worker.engines)
            raise APIError(
                404, f"model {name!r:.100} is not served: expected one of {known}", "model", "model_not_found"
            )
        return engine

    async def answer(request: Request, kind: type[Asked]) -> Response:
        asked: Asked = requests.read(await _body(request, bounds), kind)
        engine = engine_of(asked.model)
        prompts = await asyncio.to_thread(requests.prompts_of, asked, engine)
        if bounds.log_prompts:
            logger.info("%s: %s", asked.model, asked.model_dump_json(include={"prompt", "messages"}))
        longest, loop = worker.longest[asked.model], asyncio.get_running_loop()
        params = [requests.sampling_of(asked, len(prompt), engine, longest) for prompt in prompts]
        news: asyncio.Queue[tuple[Job, Any]] = asyncio.Queue()
        watched = asked.stream and asked.stream_options.continuous_usage_stats
        jobs = [
            Job(asked.model, prompt, each, index, news, loop, asked.question_tokens, watched)
            for index, (prompt, each) in enumerate(zip(prompts, params, strict=True))
        ]
        try:
            worker.submit(jobs)
        except Busy as error:
            raise APIError(429, str(error), None, "rate_limit_exceeded", Retry_After="1") from error
        except RuntimeError as error:
            raise APIError(503, str(error), None, "engine_stopped") from error
        told = Answer(asked, jobs, engine)
        if not asked.stream:
            return JSONResponse(await _while_connected(request, _whole(told, news), jobs, worker))
        pieces = _pieces(told, news)
        # what is refused has a status of its own
        first = await _while_connected(request, anext(pieces), jobs, worker)  # type: ignore[arg-type]
        return _Stream(_chained(first, pieces), lambda: worker.abort(jobs))

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await answer(request, CompletionAsked)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(request, ChatAsked)

    @app.get("/v1/models")
    async def list_models() -> Response:
        told = [
            model.model_dump() | {"max_model_len": worker.longest[model.id]} | _about(worker.engines[model.id])
            for model in models
        ]
        return JSONResponse({"object": "list", "data": told})

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> Response:
        engine_of(name)
        return JSONResponse(next(model for model in models if model.id == name).model_dump())

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        asked = _read(await _body(request, bounds), ToTokenize)
        engine = engine_of(asked.model)
        text = asked.prompt
        tokens = await asyncio.to_thread(requests.encoded, lambda: text, engine, "prompt", asked.add_special_tokens)
        longest = worker.longest[asked.model or next(iter(worker.engines))]
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": longest})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        asked = _read(await _body(request, bounds), ToDetokenize)
        engine = engine_of(asked.model)
        tokens = requests.encoded(lambda: asked.tokens, engine, "tokens") if asked.tokens else []
        return JSONResponse({"prompt": await asyncio.to_thread(engine.tokenizer.decode, tokens)})

    @app.get("/health")
    async def health() -> Response:
        if worker.failure is not None:
            raise APIError(503, "the engines have stopped", None, "engine_stopped")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(worker.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/")
    async def page() -> Response:
        return HTMLResponse(PAGE.read_text(), headers={"Content-Security-Policy": POLICY})

    return app


POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
"""What the page may load: nothing from elsewhere."""


def _about(engine: Engine) -> dict[str, Any]:
    """Tell what a page shows: whether it can chat, and what holds its cache."""
    method = "full cache" if engine.cache.layout.compression is None else "learned gates"
    if engine.policy is not None:
        method = f"{type(engine.policy).__name__}, budget {budget_name(engine.policy.budget)}"
    return {"chat_template": bool(getattr(engine.tokenizer, "chat_template", None)), "about": method}


def _bears(request: Request, keys: tuple[str, ...]) -> bool:
    given = request.headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
    same = [hmac.compare_digest(given, key.encode()) for key in keys]  # all of them, so that time tells nothing
    return any(same)


async def _body(request: Request, limits: Limits) -> Any:
    """Read a JSON body.

    Raises:
        APIError: it is too large, too slow, of another kind or no JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # which no page of another origin may send unasked
        raise APIError(415, f"content-type {kind!r:.80}: expected application/json")
    found = bytearray()

    async def read() -> None:
        async for chunk in request.stream():
            found.extend(chunk)
            if len(found) > limits.max_body_bytes:
                raise APIError(413, f"the body has more than {limits.max_body_bytes} bytes", None, "request_too_large")

    try:
        await asyncio.wait_for(read(), limits.body_seconds)
        return json.loads(found.decode("utf-8"))
    except TimeoutError as error:
        raise APIError(408, f"the body has not come within {limits.body_seconds:g} seconds") from error
    except RecursionError as error:
        raise APIError(400, "the body is nested too deeply") from error
    except ValueError as error:
        raise APIError(400, f"the body is no JSON in UTF-8: {str(error)[:200]}") from error


def _read(body: Any, kind: type[Value]) -> Value:
    try:
        return kind.model_validate(body)  # type: ignore[attr-defined, no-any-return]
    except ValueError as error:
        first = error.errors(include_url=False)[0]  # type: ignore[attr-defined]
        name = ".".join(map(str, first["loc"]))
        raise APIError(400, f"{name or 'the body'}: {first['msg'].lower()}", name or None) from error


async def _while_connected(request: Request, work: Awaitable[Value], jobs: list[Job], worker: Worker) -> Value:
    """Wait for work, and take its prompts off if the client goes away or the work fails."""

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(leave())
    is_done = False
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise APIError(499, "the client has gone")
        result = task.result()
        is_done = True
        return result
    finally:
        gone.cancel()
        task.cancel()
        if not is_done:
            worker.abort(jobs)


def _end(each: Exception | Generation) -> Generation:
    """Return how a prompt has ended.

    Raises:
        APIError: it could not be continued to its end.
    """
    if isinstance(each, Generation) and each.finish_reason != "abort":
        return each
    if isinstance(each, ValueError):
        raise requests.out_of_range(each)
    message = f"the request could not go on: {each}" if isinstance(each, Exception) else "the request was taken off"
    raise APIError(500, message, None, "generation_failed")


async def _whole(answer: Answer, news: asyncio.Queue[tuple[Job, Any]]) -> dict[str, Any]:
    ends: dict[int, Generation] = {}
    while len(ends) < len(answer.jobs):
        job, each = await news.get()
        if isinstance(each, Exception | Generation):
            ends[job.index] = _end(each)
    return await asyncio.to_thread(answer.whole, [ends[index] for index in range(len(ends))])


async def _pieces(answer: Answer, news: asyncio.Queue[tuple[Job, Any]]) -> AsyncIterator[dict[str, Any]]:
    asked, options = answer.asked, answer.asked.stream_options
    begun: set[int] = set()
    lengths: dict[tuple[int, int], int] = {}
    held: dict[int, GenerationStats] = {}
    ends: dict[int, Generation] = {}
    while len(ends) < len(answer.jobs):
        job, each = await news.get()
        if isinstance(each, GenerationStats):
            held[job.index] = each
        elif isinstance(each, TokenEvent):
            if job.index not in begun:
                begun.add(job.index)
                for piece in answer.beginning(job):
                    yield piece
            place = job.index, each.number
            lengths[place] = lengths.get(place, 0) + 1
            usage = None
            if options.continuous_usage_stats:
                usage = answer.usage([*lengths.values()], held.values(), slots=True)
            if asked.max_tokens != 0:
                yield answer.piece(job, each, usage)
        else:
            ends[job.index] = _end(each)
    if options.include_usage:
        generations = [ends[index] for index in range(len(ends))]
        yield answer.last(answer.usage([*lengths.values()], generations, slots=options.continuous_usage_stats))


async def _chained(first: Value, others: AsyncIterator[Value]) -> AsyncIterator[Value]:
    yield first
    async for each in others:
        yield each


class _Stream(StreamingResponse):
    """Pieces as server-sent events; whoever stops reading them takes the prompts off."""

    def __init__(self, pieces: AsyncIterator[dict[str, Any]], leave: Callable[[], None]) -> None:
        super().__init__(_events(pieces), media_type="text/event-stream")
        self._leave = leave

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


async def _events(pieces: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    try:
        async for piece in pieces:
            yield f"data: {json.dumps(piece)}\n\n"
    except APIError as error:  # the status has been sent
        yield f"data: {json.dumps(error.body())}\n\n"
    else:
        yield "data: [DONE]\n\n"
