"""The routes: OpenAI's, the tokenizer's, health, metrics and a page."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from pydantic import StrictBool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from dmc.config.settings import Count, Positive, checked_dataclass
from dmc.serving.metrics import written
from dmc.serving.requests import BODIES, APIError

logger = logging.getLogger(__name__)
PAGE = Path(__file__).with_name("page.html")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
"""What the page may load: nothing from elsewhere."""
OPEN = ("/", "/health")
"""Paths that need no key."""


@checked_dataclass(frozen=True)
class Limits:
    """Limits of what a client may send."""

    max_body_bytes: Count = 4 * 2**20
    """Most bytes of a request's body."""
    body_seconds: Positive = 30.0
    """Seconds until the whole body of a request must have come; else it is refused."""
    log_prompts: StrictBool = False
    """Whether bodies with prompts are written to the log."""


class Pieces(StreamingResponse):
    """A response that begins with its first piece, and closes the pieces if the client goes."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond, until the server cancels it when the grace period is over."""
        with contextlib.suppress(asyncio.CancelledError):
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """Send status, headers and pieces; an error is the status of what has not begun, and else the last event."""
        pieces: Any = self.body_iterator
        async with contextlib.aclosing(pieces):
            try:
                first = await anext(pieces)
            except APIError as error:
                nobody: Any = None
                return await JSONResponse(error.body, error.status, error.headers)({"type": "http"}, nobody, send)
            self.media_type = "text/event-stream" if first.startswith("data: ") else "application/json"
            self.init_headers()

            async def all_pieces() -> AsyncIterator[str]:
                yield first
                try:
                    async for piece in pieces:
                        yield piece
                except APIError as error:
                    yield f"data: {json.dumps(error.body)}\n\n"

            self.body_iterator = all_pieces()
            await super().stream_response(send)


def make_app(service: Any, keys: tuple[str, ...] = (), limits: Limits | None = None) -> FastAPI:
    """Build the application in front of a service: the routes of OpenAI's API and the page.

    Args:
        service: what answers: `LocalService`, or the `Replicas` of Ray.
        keys: keys, one of which every request must carry; empty: no key is asked for.
        limits: limits of bodies, and whether they are logged; None: the defaults.
    Returns:
        An application that answers an `APIError` with its status, in OpenAI's form, and any other error with 500.
    """
    bounds = limits or Limits()

    def check_key(request: Request) -> None:
        if not keys or request.scope["path"] in OPEN:  # request.url would believe the client's Host
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
        if not sum(hmac.compare_digest(given, key.encode()) for key in keys):  # all of them: time tells nothing
            raise APIError(401, "the key is missing or wrong: send Authorization: Bearer KEY", None, "invalid_api_key")

    async def tell(request: Request, error: Exception) -> JSONResponse:
        headers = getattr(error, "headers", None)  # of a wrong method: the right ones
        if isinstance(error, HTTPException):
            message = f"{request.method} {request.url.path}: {error.detail}".encode("ascii", "replace").decode()
            error = APIError(error.status_code, message)
        elif not isinstance(error, APIError):
            error = APIError(500, f"the server has failed: {type(error).__name__}")
        return JSONResponse(error.body, error.status, headers)

    options: dict[str, Any] = dict.fromkeys(("docs_url", "redoc_url", "openapi_url")) | {"redirect_slashes": False}
    options["exception_handlers"] = dict.fromkeys((APIError, HTTPException, ClientDisconnect, Exception), tell)
    app = FastAPI(dependencies=[Depends(check_key)], **options)

    async def ask(request: Request) -> Response:
        path, body = request.scope["path"], b""
        if request.method == "POST":
            body = await read_body(request, bounds)
            if bounds.log_prompts and "completions" in path:
                logger.warning("%s", ascii(body.decode(errors="replace")))  # a line, whatever the body holds
        return Pieces(service.answer(path, body))

    for path in BODIES:
        app.post(path)(ask)
    for path in ("/v1/models", "/v1/models/{name:path}"):
        app.get(path)(ask)
    app.get("/health")(service.health)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(written(await service.metrics()), media_type="text/plain; version=0.0.4")

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
    try:
        with anyio.fail_after(limits.body_seconds):
            async for chunk in request.stream():
                found.extend(chunk)
                if len(found) > limits.max_body_bytes:
                    told = f"the body has more than {limits.max_body_bytes} bytes"
                    raise APIError(413, told, None, "request_too_large")
    except TimeoutError as error:
        raise APIError(408, f"the body has not come within {limits.body_seconds:g} seconds") from error
    return bytes(found)
