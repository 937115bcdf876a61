"""Replicas under Ray Serve, each with engines of its own, and the application that hands requests out to them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from prometheus_client import Metric
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from dmc.serving.app import End, Limits, bare_app, event, make_app, read_body, while_connected
from dmc.serving.config import ServeConfig, make_worker
from dmc.serving.metrics import of_replicas, written
from dmc.serving.requests import APIError

logger = logging.getLogger(__name__)
MOST_AHEAD = 4
"""Requests that a replica may have more than the idlest one, and still gets those of its conversations."""
BEGINNING = 128
"""Characters or tokens of a prompt by which later ones are recognized as the same conversation."""
JOIN_SECONDS = 60.0
"""Machines of a cluster may join it so much later than its first."""


class ConversationRouter(RequestRouter):
    """Sends all of a conversation to one replica, found by rendezvous hashing, unless others are much idler.

    Of Ray's own routers the one for prefixes needs vLLM, and the one for sessions heeds no queue.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank the replicas, the best for the request first; see Ray's `RequestRouter`."""
        loads = {each.replica_id: self.replica_queue_len_cache.get(each.replica_id) or 0 for each in candidate_replicas}
        if candidate_replicas and pending_request is not None and (session := pending_request.metadata.session_id):
            homes = sorted(loads, key=lambda each: hash((session, each)))  # the next one if the first is too busy
            loads[next(each for each in homes if loads[each] <= min(loads.values()) + MOST_AHEAD)] = -1
        return [[each] for each in sorted(candidate_replicas, key=lambda each: loads[each.replica_id])]


def conversation_of(body: bytes) -> str:
    """Return a conversation's name: a hash of the messages up to the user's first, or of a prompt's beginning."""
    try:
        asked = json.loads(body)
        said = (asked.get("messages") or asked["prompt"])[:BEGINNING]
        users = (index for index, each in enumerate(said) if isinstance(each, dict) and each.get("role") == "user")
        return str(hash(json.dumps([asked.get("model"), said[: next(users, BEGINNING) + 1]])))
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):  # the replica says what is wrong
        return ""


class Replica:
    """The application of one process; requests reach it through Ray, not through a socket."""

    def __init__(self, config: ServeConfig, policies: Path, num_sharing: int) -> None:
        self._worker = make_worker(config, policies, num_sharing)
        self._worker.start()
        self._app = make_app(self._worker, limits=config.limits)

    async def answer(self, method: str, path: str, body: bytes) -> AsyncIterator[Any]:
        """Yield status and headers of the answer, then its body piece by piece."""
        sent: asyncio.Queue[Any] = asyncio.Queue()
        given = [{"type": "http.request", "body": body}]

        async def receive() -> dict[str, Any]:
            return given.pop() if given else await asyncio.Future()  # who leaves cancels this

        headers = [(b"content-type", b"application/json"), (b"host", b"replica")]
        place: dict[str, Any] = {"method": method, "path": path, "query_string": b"", "root_path": ""}
        task = asyncio.ensure_future(self._app({"type": "http", "headers": headers, **place}, receive, sent.put))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], {name.decode(): value.decode() for name, value in message["headers"]}
                elif message.get("body"):
                    yield message["body"]
        finally:
            task.cancel()

    async def metrics(self) -> tuple[str, list[Metric]]:
        """Return the replica's name and its metrics."""
        return serve.get_replica_context().replica_id.unique_id, self._worker.metrics.collect()

    def check_health(self) -> bool:
        """Tell Ray that the replica works; it replaces one that raises.

        Raises:
            RuntimeError: the engines have stopped.
        """
        if self._worker.failure is not None:
            raise RuntimeError(f"the engines have stopped: {self._worker.failure}")
        return True

    def __del__(self) -> None:
        self._worker.stop()


def start(config: ServeConfig, policies: Path, keys: tuple[str, ...]) -> tuple[FastAPI, Callable[[], None]]:
    """Start replicas on the cluster of RAY_ADDRESS, or on this machine.

    Returns:
        The application that hands requests out to them, and what ends them.
    Raises:
        ValueError: there are not as many devices, or no replica can start.
    """
    joins = "RAY_ADDRESS" in os.environ
    local: dict[str, Any] = {} if joins else {"address": "local", "include_dashboard": False}
    ray.init(**local, log_to_driver=False, logging_level=logging.ERROR)
    least, end = config.replicas or 1, time.monotonic() + (JOIN_SECONDS if joins else 0)
    most, num_sharing = config.max_replicas or least, 1
    while True:
        found = ray.cluster_resources()
        kind = "GPU" if found.get("GPU") else "CPU"
        if (number := int(found.get(kind, 0))) >= least:
            break
        if time.monotonic() > end:
            raise ValueError(f"replicas={least}: the cluster has {number} {kind}s, and each needs one")
        time.sleep(1)
    needs = {"num_gpus": 1} if kind == "GPU" else {"num_cpus": max(1, number // most)}
    if kind == "CPU":
        cpus = max(int(each["Resources"].get("CPU", 0)) for each in ray.nodes())  # of one machine
        num_sharing = max(1, cpus // needs["num_cpus"] if joins else min(most, cpus // needs["num_cpus"]))
    router: Any = ConversationRouter
    scale = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": config.target_ongoing_requests}
    options: dict[str, Any] = {
        "autoscaling_config": scale,
        "ray_actor_options": needs,
        "max_ongoing_requests": config.engine.get("max_batch_size", 32) * len(config.models),  # more would wait behind
        "max_queued_requests": config.max_waiting,
        "health_check_period_s": 2,
        "graceful_shutdown_timeout_s": config.grace_seconds,
        "max_constructor_retry_count": 2,
        "request_router_config": RequestRouterConfig(request_router_class=router),
    }
    serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    name = f"dmc-{uuid.uuid4().hex[:8]}"  # others may serve on this cluster

    def stop() -> None:
        serve.delete(name) if joins else serve.shutdown()
        ray.shutdown()

    try:
        replicas: Any = serve.deployment(Replica, **options)
        silent = replace(config, limits=replace(config.limits, log_prompts=False))  # the front logs them
        handle = serve.run(replicas.bind(silent, policies, num_sharing), name=name, route_prefix=None)
    except RuntimeError as error:
        told = serve.status().applications[name].deployments["Replica"].message or str(error)
        stop()
        raise ValueError(f"no replica could start: {told.strip().splitlines()[-1]}") from error
    except BaseException:
        stop()
        raise
    return make_front(handle, keys, config.limits), stop


def make_front(handle: Any, keys: tuple[str, ...], limits: Limits) -> FastAPI:
    """Build the application that hands requests out to replicas.

    Args:
        handle: Ray Serve's handle of the replicas.
        keys: see `bare_app`.
        limits: limits of bodies.
    Returns:
        An application that answers with a replica's answer, or with status 503 where no replica lives.
    """
    app = bare_app(keys)

    async def ask_all(method: str) -> list[Any]:
        """Call a method of every replica, past the queue; return the results of those that answer."""
        try:
            told = await handle.broadcast(method).results_async(timeout_s=10, return_exceptions=True)
        except (RayServeException, TimeoutError):
            told = []
        if found := [each for each in told if not isinstance(each, BaseException)]:
            return found
        raise APIError(503, "no replica runs, or all of them hang", None, "engine_stopped", Retry_After="1")

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "replicas": len(await ask_all("check_health"))}

    @app.get("/metrics")
    async def metrics() -> Response:
        return written(of_replicas(dict(await ask_all("metrics"))))

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def forward(request: Request, end: End) -> Response:
        body = await read_body(request, limits) if request.method == "POST" else b""
        if limits.log_prompts and body and request.scope["path"] in ("/v1/completions", "/v1/chat/completions"):
            logger.warning("%s", ascii(body.decode(errors="replace")))  # a line, whatever the body holds
        options = {"method_name": "answer", "stream": True, "session_id": conversation_of(body)}
        pieces: Any = handle.options(**options).remote(request.method, request.scope["path"], body)
        end.callback(pieces.cancel)
        try:
            return await while_connected(request, passed_on(pieces))
        except BackPressureError as error:
            raise APIError(429, "all replicas are busy", None, "rate_limit_exceeded", Retry_After="1") from error
        except (RayError, RayServeException) as error:
            raise lost() from error

    return app


def lost() -> APIError:
    """Return the error of a request whose replica has died."""
    message = "the replica that had this request has died: send it again"
    return APIError(503, message, None, "replica_lost", Retry_After="1")


async def passed_on(pieces: Any) -> Response:
    """Wait for a replica's answer, or for the beginning of a stream."""
    status, headers = await anext(pieces)
    if headers.get("content-type", "").startswith("text/event-stream"):
        return StreamingResponse(streamed(pieces), status, headers)
    return Response(b"".join([each async for each in pieces]), status, headers)


async def streamed(pieces: Any) -> AsyncIterator[bytes | str]:
    """Forward a stream; if its replica dies, the stream ends with an error."""
    try:
        async for piece in pieces:
            yield piece
    except (RayError, RayServeException):
        yield event(lost().body)
