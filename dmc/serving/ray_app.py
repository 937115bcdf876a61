"""Replicas under Ray Serve, each with engines of its own, and the application that hands requests out to them."""

from __future__ import annotations

import asyncio
import collections
import json
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from dmc.serving.app import End, Limits, bare_app, event, make_app, read_body, while_connected
from dmc.serving.requests import APIError
from dmc.serving.server import ServeConfig, make_worker

MOST_PREFIXES = 65536
MOST_AHEAD = 4
"""Requests that a replica may have more than the idlest one, and still gets those whose beginning it knows."""
JOIN_SECONDS = 60.0
"""Machines of a cluster may join it so much later than its first."""


@dataclass(frozen=True)
class Forwarded:
    """A request on its way to a replica."""

    method: str
    path: str
    body: bytes = b""

    def beginnings(self) -> list[int]:
        """Name the beginnings of what is to be continued, the longest first; a conversation's next turn shares most."""
        try:
            body = json.loads(self.body or b"{}")
            asked = json.dumps([body.get("model"), body.get("messages") or body.get("prompt")])
        except (ValueError, AttributeError, RecursionError):  # the replica says what is wrong
            return []
        return [hash(asked[: 2**power]) for power in range(21, 5, -1) if 2**power <= len(asked)]


class PrefixRouter(RequestRouter):
    """Sends a request where its beginning has been computed, unless others are much idler there.

    Ray's own routers of this kind need vLLM and ask an actor before each request, or heed no queue.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """See Ray."""
        self._homes: collections.OrderedDict[int, ReplicaID] = collections.OrderedDict()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank the replicas."""
        loads = {each.replica_id: self.replica_queue_len_cache.get(each.replica_id) or 0 for each in candidate_replicas}
        known = [self._homes.get(each) for each in pending_request.args[0].beginnings()] if pending_request else []
        home = next((each for each in known if each in loads), None)
        if home is not None and loads[home] <= min(loads.values()) + MOST_AHEAD:
            loads[home] = -1
        return [[each] for each in sorted(candidate_replicas, key=lambda each: loads[each.replica_id])]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note whose cache begins so."""
        for beginning in pending_request.args[0].beginnings():
            self._homes[beginning] = replica_id
            self._homes.move_to_end(beginning)
        while len(self._homes) > MOST_PREFIXES:
            self._homes.popitem(last=False)


class Replica:
    """The application of one process, without its socket."""

    def __init__(self, config: ServeConfig, policies: Path) -> None:
        self._worker = make_worker(config, policies)
        self._worker.start()
        self._app = make_app(self._worker, limits=config.limits)

    async def answer(self, asked: Forwarded) -> AsyncIterator[Any]:
        """Yield status and headers, then the body as it comes."""
        sent: asyncio.Queue[Any] = asyncio.Queue()
        body = [{"type": "http.request", "body": asked.body}]

        async def receive() -> dict[str, Any]:
            return body.pop() if body else await asyncio.Future()  # who leaves cancels this

        scope = {
            **{"type": "http", "method": asked.method, "path": asked.path, "query_string": b"", "root_path": ""},
            "headers": [(b"content-type", b"application/json"), (b"host", b"replica")],
        }
        task = asyncio.ensure_future(self._app(scope, receive, sent.put))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], {name.decode(): value.decode() for name, value in message["headers"]}
                elif message.get("body"):
                    yield message["body"]
        finally:
            task.cancel()

    async def metrics(self) -> str:
        """See `Metrics`."""
        return self._worker.metrics.text().decode()

    def check_health(self) -> bool:
        """Let Ray start another replica in place of one whose engines have stopped."""
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
    assert config.replicas is not None
    joins = "RAY_ADDRESS" in os.environ
    options: dict[str, Any] = {} if joins else {"address": "local", "include_dashboard": False}
    ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    end = time.monotonic() + (JOIN_SECONDS if joins else 0)
    while True:
        found = ray.cluster_resources()
        kind = "GPU" if found.get("GPU") else "CPU"
        if (number := int(found.get(kind, 0))) >= config.replicas:
            break
        if time.monotonic() > end:
            raise ValueError(f"replicas={config.replicas}: the cluster has {number} {kind}s, and each needs one")
        time.sleep(1)
    most = config.max_replicas or config.replicas
    scale = {"min_replicas": config.replicas, "max_replicas": most}
    make: Any = serve.deployment  # whose types say less than it takes
    router: Any = PrefixRouter
    deployment = make(
        Replica,
        autoscaling_config={**scale, "target_ongoing_requests": config.target_ongoing_requests},
        ray_actor_options={"num_gpus": 1} if kind == "GPU" else {"num_cpus": max(1, number // most)},
        max_ongoing_requests=config.engine.get("max_batch_size", 32) * len(config.models),  # more would wait behind
        max_queued_requests=config.max_waiting,
        health_check_period_s=2,
        graceful_shutdown_timeout_s=config.grace_seconds,
        max_constructor_retry_count=2,
        request_router_config=RequestRouterConfig(request_router_class=router),
    )
    serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    name = f"dmc-{uuid.uuid4().hex[:8]}"  # others may serve on this cluster

    def stop() -> None:
        serve.delete(name) if joins else serve.shutdown()
        ray.shutdown()

    try:
        handle = serve.run(deployment.bind(config, policies), name=name, route_prefix=None)
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
        handle: of the replicas.
        keys: see `bare_app`.
        limits: on bodies.
    """
    app = bare_app(keys)

    async def ask_all(method: str) -> list[Any]:
        """Ask every replica that answers, beside the queue."""
        try:
            told = await handle.broadcast(method).results_async(timeout_s=10, return_exceptions=True)
        except (RayServeException, TimeoutError) as error:
            raise APIError(503, "no replica runs, or one hangs", None, "engine_stopped", Retry_After="1") from error
        return [each for each in told if not isinstance(each, BaseException)]

    @app.get("/health")
    async def health() -> Response:
        if not (found := await ask_all("check_health")):
            raise APIError(503, "no replica runs", None, "engine_stopped", Retry_After="1")
        return JSONResponse({"status": "ok", "replicas": len(found)})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(added(await ask_all("metrics")), media_type="text/plain; version=0.0.4")

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def forward(request: Request, end: End) -> Response:
        body = await read_body(request, limits) if request.method == "POST" else b""
        asked = Forwarded(request.method, request.scope["path"], body)
        pieces: Any = handle.options(method_name="answer", stream=True).remote(asked)
        end.callback(pieces.cancel)
        try:
            status, headers = await while_connected(request, anext(pieces))
        except BackPressureError as error:
            raise APIError(429, "all replicas are busy", None, "rate_limit_exceeded", Retry_After="1") from error
        except (RayError, RayServeException) as error:
            raise lost() from error
        return StreamingResponse(relay(pieces, headers), status, headers)

    return app


def lost() -> APIError:
    """Tell that a replica has died, and what it was doing with it."""
    message = "the replica that had this request has died: send it again"
    return APIError(503, message, None, "replica_lost", Retry_After="1")


async def relay(pieces: Any, headers: dict[str, str]) -> AsyncIterator[bytes | str]:
    """Pass a body on; if its replica dies a stream ends with an error, and all else before its length."""
    try:
        async for piece in pieces:
            yield piece
    except (RayError, RayServeException):
        if not headers["content-type"].startswith("text/event-stream"):
            raise
        yield event(lost().body)


def added(texts: list[str]) -> str:
    """Add up what several processes count, in Prometheus' form."""
    totals: dict[str, float | None] = {}
    for line in "".join(texts).splitlines():
        name, _, value = line.rpartition(" ")
        if line.startswith("#"):
            totals[line] = None
        else:
            totals[name] = (totals.get(name) or 0.0) + float(value)
    return "".join(name + ("\n" if value is None else f" {value!r}\n") for name, value in totals.items())
