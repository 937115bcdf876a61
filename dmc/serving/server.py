"""The HTTP server: OpenAI's routes, the tokenizer's, health, metrics and a page; and the process that serves them."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from dmc.serving.answers import LocalService
from dmc.serving.config import Limits, ServeConfig, make_worker
from dmc.serving.metrics import text_format
from dmc.serving.requests import BODIES, APIError, ModelsRequest, parse

logger = logging.getLogger(__name__)
PAGE = Path(__file__).with_name("page.html")
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
"""The page loads nothing from other hosts."""
PUBLIC_PATHS = ("/", "/health")
"""Paths that need no key."""


class AnswerResponse(StreamingResponse):
    """A response that starts with its first chunk, and closes the chunks if the client disconnects."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond, until the server cancels it when the grace period is over."""
        with contextlib.suppress(asyncio.CancelledError):
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """Send status, headers and chunks; an error is the status before the first chunk, and else the last event."""
        chunks: Any = self.body_iterator
        async with contextlib.aclosing(chunks):
            try:
                first = await anext(chunks)
            except APIError as error:
                receive: Any = None  # not needed to send
                return await JSONResponse(error.body, error.status, error.headers)({"type": "http"}, receive, send)
            self.media_type = "text/event-stream" if first.startswith("data: ") else "application/json"
            self.init_headers()

            async def all_chunks() -> AsyncIterator[str]:
                yield first
                try:
                    async for chunk in chunks:
                        yield chunk
                except APIError as error:
                    yield f"data: {json.dumps(error.body)}\n\n"

            self.body_iterator = all_chunks()
            await super().stream_response(send)


def make_app(service: Any, keys: tuple[str, ...] = (), limits: Limits | None = None) -> FastAPI:
    """Build the application in front of a service: the routes of OpenAI's API and the page.

    Args:
        service: `LocalService`, or the `Replicas` of Ray.
        keys: keys, one of which every request must carry; empty: no key is needed.
        limits: limits of bodies, and whether they are logged; None: the defaults.
    Returns:
        An application that answers an `APIError` with its status, in OpenAI's format, and any other error with 500.
    """
    bounds = limits or Limits()

    def check_key(request: Request) -> None:
        if not keys or request.scope["path"] in PUBLIC_PATHS:  # request.url would trust the client's Host header
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
        if not sum(hmac.compare_digest(given, key.encode()) for key in keys):  # compare all: timing reveals nothing
            raise APIError(401, "the key is missing or wrong: send Authorization: Bearer KEY", None, "invalid_api_key")

    async def error_response(request: Request, error: Exception) -> JSONResponse:
        headers = getattr(error, "headers", None)  # a 405 names the allowed methods
        if isinstance(error, HTTPException):
            message = f"{request.method} {request.url.path}: {error.detail}".encode("ascii", "replace").decode()
            error = APIError(error.status_code, message)
        elif not isinstance(error, APIError):
            error = APIError(500, f"the server has failed: {type(error).__name__}")
        return JSONResponse(error.body, error.status, headers)

    options: dict[str, Any] = dict.fromkeys(("docs_url", "redoc_url", "openapi_url")) | {"redirect_slashes": False}
    options["exception_handlers"] = dict.fromkeys(
        (APIError, HTTPException, ClientDisconnect, Exception), error_response
    )
    app = FastAPI(dependencies=[Depends(check_key)], **options)

    async def answer(request: Request) -> Response:
        path, body = request.scope["path"], await read_body(request, bounds)
        if bounds.log_prompts and "completions" in path:
            logger.warning("%s", ascii(body.decode(errors="replace")))  # ascii: one line
        return AnswerResponse(service.answer(await asyncio.to_thread(parse, BODIES[path], body)))

    for path in BODIES:
        app.post(path)(answer)

    @app.get("/v1/models")
    @app.get("/v1/models/{model:path}")
    async def models(model: str | None = None) -> Response:
        return AnswerResponse(service.answer(ModelsRequest(model=model)))

    app.get("/health")(service.health)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(text_format(await service.metrics()), media_type="text/plain; version=0.0.4")

    @app.get("/")
    async def page() -> Response:
        return HTMLResponse(PAGE.read_text(), headers={"Content-Security-Policy": CONTENT_SECURITY_POLICY})

    return app


async def read_body(request: Request, limits: Limits) -> bytes:
    """Read a JSON body.

    Raises:
        APIError: it is too large, too slow or of another type.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":  # browsers send it to other origins only with permission
        raise APIError(415, f"content-type {content_type!r:.80}: expected application/json")
    body = bytearray()
    try:
        with anyio.fail_after(limits.body_seconds):
            async for chunk in request.stream():
                body.extend(chunk)
                if len(body) > limits.max_body_bytes:
                    message = f"the body has more than {limits.max_body_bytes} bytes"
                    raise APIError(413, message, None, "request_too_large")
    except TimeoutError as error:
        raise APIError(408, f"the body did not arrive within {limits.body_seconds:g} seconds") from error
    return bytes(body)


def serve(config: ServeConfig, policies: Path, started: Callable[[int], None] = lambda port: None) -> None:
    """Serve until SIGTERM or SIGINT; running requests then have `grace_seconds` to finish.

    Args:
        config: configuration of the server.
        policies: folder of the policies' settings.
        started: called with the port once the server answers.
    Raises:
        ValueError, OSError: see `make_worker`; the address is in use.
        ImportError: `replicas` is given, and Ray is not installed.
    """
    keys, is_first = config.keys(), os.environ.get("RANK", "0") == "0"
    listener: Any = _bind(config.host, config.port) if is_first else None  # before models are loaded
    worker = None
    if config.replicas is None:
        worker = make_worker(config, policies)
        service: Any = LocalService(worker)
        stop = worker.stop
    else:
        if "RAY_ADDRESS" not in os.environ:  # Ray's ports are open to all; it reads this when it is imported
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        try:
            from dmc.serving import ray_app
        except ImportError as error:
            raise ImportError(f"replicas= needs Ray ({error}): pip install 'dmc-retrofit[ray]'") from error
        service, stop = ray_app.start(config, policies)
    options: dict[str, Any] = {"log_level": logging.WARNING, "access_log": False, "server_header": False}
    app = make_app(service, keys, config.limits)
    server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=config.grace_seconds, **options))
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again at its end; the first rank ends the rest
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    if worker is not None:
        (worker.start if is_first else worker.run)()
    if listener is None:
        return
    try:
        listener.listen(2048)
        started(listener.getsockname()[1])
        server.run(sockets=[listener])
    finally:
        stop()


def _bind(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port} ({error.strerror}): give another port=") from error
    return listener
