"""The routes: OpenAI's, the tokenizer's, health, metrics and a page."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from openai.types import Model
from pydantic import StrictBool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from dmc.policies.from_config import budget_name
from dmc.runtime import Engine
from dmc.serving import requests
from dmc.serving.answers import Answer
from dmc.serving.metrics import written
from dmc.serving.requests import APIError
from dmc.serving.worker import Job, Worker
from dmc.settings import Count, Positive, checked_dataclass

logger = logging.getLogger(__name__)
PAGE = Path(__file__).with_name("page.html")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
"""What the page may load: nothing from elsewhere."""
OPEN = ("/", "/health")
"""Paths that need no key."""
Value = TypeVar("Value")


@checked_dataclass(frozen=True)
class Limits:
    """Limits of what a client may send."""

    max_body_bytes: Count = 4 * 2**20
    """Most bytes of a request's body."""
    body_seconds: Positive = 30.0
    """Seconds until the whole body of a request must have come; else it is refused."""
    log_prompts: StrictBool = False
    """Whether prompts are written to the log."""


async def _end() -> AsyncIterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


End = Annotated[contextlib.ExitStack, Depends(_end)]
"""Callbacks that run when an answer has been sent, or its client has gone."""


def bare_app(keys: tuple[str, ...]) -> FastAPI:
    """Build an application without routes, which tells errors in OpenAI's form.

    Args:
        keys: keys, one of which every request must carry; empty: no key is asked for.
    Returns:
        An application that answers an `APIError` with its status, and any other error with status 500.
    """

    def check_key(request: Request) -> None:
        if not keys or request.scope["path"] in OPEN:  # request.url would believe the client's Host
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
        if not sum(hmac.compare_digest(given, key.encode()) for key in keys):  # all of them: time tells nothing
            raise APIError(401, "the key is missing or wrong: send Authorization: Bearer KEY", None, "invalid_api_key")

    async def tell(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException):
            message = f"{request.method} {request.url.path}: {error.detail}".encode("ascii", "replace").decode()
            error = APIError(error.status_code, message, **(error.headers or {}))
        elif not isinstance(error, APIError):
            error = APIError(500, f"the server has failed: {type(error).__name__}")
        return JSONResponse(error.body, error.status, error.headers)

    options: dict[str, Any] = dict.fromkeys(("docs_url", "redoc_url", "openapi_url")) | {"redirect_slashes": False}
    options["exception_handlers"] = dict.fromkeys((APIError, HTTPException, ClientDisconnect, Exception), tell)
    return FastAPI(dependencies=[Depends(check_key)], **options)


def make_app(worker: Worker, keys: tuple[str, ...] = (), limits: Limits | None = None) -> FastAPI:
    """Build the application around a running worker: the routes of OpenAI's API and the page.

    Args:
        worker: thread that steps the engines.
        keys: see `bare_app`.
        limits: limits of bodies, and whether prompts are logged; None: the defaults.
    Returns:
        An application that answers wrong requests with an `APIError`'s status.
    """
    app, bounds, began = bare_app(keys), limits or Limits(), int(time.time())

    def engine_of(name: str | None) -> Engine:
        engine = next(iter(worker.engines.values())) if name is None else worker.engines.get(name)
        if engine is None:
            message = f"model {name!r:.100} is not served: expected one of {', '.join(worker.engines)}"
            raise APIError(404, message, "model", "model_not_found")
        return engine

    async def read(request: Request, kind: type[requests.Kind]) -> tuple[requests.Kind, Engine]:
        asked: Any = await asyncio.to_thread(requests.read, await read_body(request, bounds), kind)
        return asked, engine_of(asked.model)

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def complete(request: Request, end: End) -> Response:
        is_chat = request.scope["path"].endswith("/chat/completions")
        asked, engine = await read(request, requests.ChatAsked if is_chat else requests.CompletionAsked)
        prompts = await asyncio.to_thread(requests.prompts_of, asked, engine)
        if bounds.log_prompts:
            logger.warning("%s: %s", asked.model, asked.model_dump_json(include={"prompt", "messages"}))
        params = [requests.sampling_of(asked, len(each), engine, worker.longest[asked.model]) for each in prompts]
        events: asyncio.Queue[tuple[Job, Any]] = asyncio.Queue()
        watched = asked.stream and asked.stream_options.continuous_usage_stats
        own: Any = (events, asyncio.get_running_loop(), asked.question_tokens, watched)
        jobs = [Job(asked.model, prompts[index], each, index, *own) for index, each in enumerate(params)]
        end.callback(worker.abort, jobs)
        worker.submit(jobs)
        answer = Answer(asked, jobs, engine, events)
        if not asked.stream:
            return Response(await while_connected(request, answer.whole()), media_type="application/json")
        pieces: Any = answer.pieces()
        first = await while_connected(request, anext(pieces))  # what is refused has a status of its own
        return StreamingResponse(_sent(first, pieces), media_type="text/event-stream")

    def about(name: str) -> dict[str, Any]:
        engine = engine_of(name)
        method = "Full cache" if engine.cache.layout.compression is None else "Learned gates"
        if engine.policy is not None:
            method = f"{type(engine.policy).__name__}, budget {budget_name(engine.policy.budget)}"
        chats = bool(getattr(engine.tokenizer, "chat_template", None))
        more = {"max_model_len": worker.longest[name], "chat_template": chats, "about": method}
        return Model(id=name, object="model", created=began, owned_by="dmc").model_dump() | more

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [about(name) for name in worker.engines]}

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> dict[str, Any]:
        return about(name)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        asked, engine = await read(request, requests.ToTokenize)
        tokens = await asyncio.to_thread(requests.encoded, asked.prompt, engine, "prompt", asked.add_special_tokens)
        longest = worker.longest[asked.model or next(iter(worker.engines))]
        return {"tokens": tokens, "count": len(tokens), "max_model_len": longest}

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, str]:
        asked, engine = await read(request, requests.ToDetokenize)
        tokens = asked.tokens and await asyncio.to_thread(requests.encoded, asked.tokens, engine, "tokens")
        return {"prompt": await asyncio.to_thread(engine.tokenizer.decode, tokens)}

    @app.get("/health")
    async def health() -> dict[str, str]:
        if worker.failure is not None:
            raise APIError(503, "the engines have stopped", None, "engine_stopped")
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return written(worker.metrics.collect())

    @app.get("/")
    async def page() -> Response:
        return HTMLResponse(PAGE.read_text(), headers={"Content-Security-Policy": POLICY})

    return app


async def read_body(request: Request, limits: Limits) -> bytes:
    """Read a body of JSON.

    Raises:
        APIError: it is too large, too slow or of another kind.
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
    except asyncio.TimeoutError as error:
        raise APIError(408, f"the body has not come within {limits.body_seconds:g} seconds") from error
    return bytes(found)


async def while_connected(request: Request, work: Awaitable[Value]) -> Value:
    """Wait for a result while the client is connected.

    Raises:
        ClientDisconnect: the client has gone; the work is canceled.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = task, _ = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in tasks:
            each.cancel()


def event(body: dict[str, Any]) -> str:
    """Write a server-sent event."""
    return f"data: {json.dumps(body)}\n\n"


async def _sent(first: str, pieces: AsyncIterator[str]) -> AsyncIterator[str]:
    """Write server-sent events."""
    yield f"data: {first}\n\n"
    try:
        async for piece in pieces:
            yield f"data: {piece}\n\n"
    except APIError as error:  # the status has been sent
        yield event(error.body)
    else:
        yield "data: [DONE]\n\n"
