"""Replicas under Ray Serve, each with separate engines, and the service that routes requests to them."""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import ray
from prometheus_client import Metric
from pydantic import ValidationError
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from dmc.serving.answers import LocalService
from dmc.serving.config import ServeConfig, make_worker
from dmc.serving.requests import APIError, ChatRequest, CompletionRequest

PREFIX_LENGTH = 128
"""Characters or tokens of a prompt that identify a conversation."""


def session_id(request: Any) -> str:
    """Return a session id: a hash of the messages up to the user's first, or of a prompt's beginning."""
    if isinstance(request, ChatRequest):
        users = (index for index, message in enumerate(request.messages) if message.role == "user")
        prefix: Any = request.messages[: next(users, 0) + 1]
    elif isinstance(request, CompletionRequest):
        prefix = request.prompt[:PREFIX_LENGTH]
    else:
        return ""
    return str(hash(repr((request.model, prefix))))


class Replica(LocalService):
    """Answers from the engines of one process; requests reach it through Ray, not through a socket."""

    def __init__(self, config: ServeConfig, policies: Path) -> None:
        super().__init__(make_worker(config, policies))
        self.worker.start()

    async def answer(self, request: Any) -> AsyncIterator[Any]:
        """Yield the chunks of an answer, and the error that ends them: Ray would wrap one that is raised."""
        answer: Any = super().answer(request)
        async with contextlib.aclosing(answer) as chunks:
            try:
                async for chunk in chunks:
                    yield chunk
            except APIError as error:
                yield error
            except Exception as error:
                logging.getLogger(__name__).exception("a request has failed")
                yield APIError(500, f"the server has failed: {type(error).__name__}")

    async def metrics(self) -> dict[str, list[Metric]]:
        """Return the metrics by the replica's name."""
        return {serve.get_replica_context().replica_id.unique_id: self.worker.metrics.collect()}

    check_health = LocalService.health
    """Ray calls it, and replaces a replica that raises."""


class Replicas:
    """Answers from replicas, through Ray Serve's handle of them, as `LocalService` does."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def answer(self, request: Any) -> AsyncIterator[str]:
        """Yield the chunks of an answer.

        Raises:
            APIError: the request is wrong, all replicas are busy, or its replica has died.
        """
        options = {"method_name": "answer", "stream": True, "session_id": session_id(request)}
        chunks = self._handle.options(**options).remote(request)
        try:
            async for chunk in chunks:
                if isinstance(chunk, APIError):
                    raise chunk
                yield chunk
        except BackPressureError as error:
            raise APIError(429, "all replicas are busy", None, "rate_limit_exceeded") from error
        except (RayError, RayServeException) as error:
            raise APIError(503, "the replica of this request has died: send it again", None, "replica_lost") from error
        finally:
            chunks.cancel()

    async def health(self) -> dict[str, Any]:
        """Count the replicas that answer."""
        return {"status": "ok", "replicas": len(await self._broadcast("health"))}

    async def metrics(self) -> dict[str, list[Metric]]:
        """Return the metrics of each replica by its name."""
        return {name: metrics for result in await self._broadcast("metrics") for name, metrics in result.items()}

    async def _broadcast(self, method: str) -> list[Any]:
        """Call a method of every replica, bypassing the queue; return the results of those that answer."""
        try:
            results = await self._handle.broadcast(method).results_async(timeout_s=10, return_exceptions=True)
        except (RayServeException, TimeoutError):
            results = []
        if answers := [result for result in results if not isinstance(result, BaseException)]:
            return answers
        raise APIError(503, "no replica answers", None, "engine_stopped")


def _autoscaling(config: ServeConfig) -> dict[str, Any]:
    scale: dict[str, Any] = {"min_replicas": config.replicas, "max_replicas": config.replicas}
    scale |= {option: value for option, value in config.autoscaling.items() if value is not None}
    try:
        AutoscalingConfig(**scale)
    except ValidationError as error:
        raise ValueError(f"autoscaling={scale}: {error.errors()[0]['msg']}") from error
    if unknown := scale.keys() - AutoscalingConfig.model_fields.keys():
        raise ValueError(f"unknown setting autoscaling.{min(unknown)}: Ray Serve's AutoscalingConfig has none")
    return scale


def start(config: ServeConfig, policies: Path) -> tuple[Replicas, Callable[[], None]]:
    """Start replicas on the cluster of RAY_ADDRESS, or on this machine.

    Returns:
        The service that routes requests to them, and a function that stops them.
    Raises:
        ValueError: this machine has too few devices, autoscaling is wrong, or no replica can start.
    """
    num_replicas, scale = config.replicas or 1, _autoscaling(config)
    joins_cluster = "RAY_ADDRESS" in os.environ
    local: dict[str, Any] = {} if joins_cluster else {"address": "local", "include_dashboard": False}
    ray.init(**local, log_to_driver=False, logging_level=logging.ERROR)
    name = f"dmc-{uuid.uuid4().hex[:8]}"  # others may serve on this cluster

    def stop() -> None:
        serve.delete(name) if joins_cluster else serve.shutdown()
        ray.shutdown()

    kind = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
    num_devices = int(ray.cluster_resources().get(kind, 0))
    router: Any = ConsistentHashRouter
    options: dict[str, Any] = {
        "autoscaling_config": scale,
        "ray_actor_options": {
            f"num_{kind.lower()}s": 1 if kind == "GPU" else max(1, num_devices // scale["max_replicas"])
        },
        "max_ongoing_requests": config.engine.get("max_batch_size", 32) * len(config.models),  # more would wait behind
        "max_queued_requests": config.max_waiting,
        "health_check_period_s": 2,
        "graceful_shutdown_timeout_s": config.grace_seconds,
        "max_constructor_retry_count": 1,  # a model that does not load once will not load
        "request_router_config": RequestRouterConfig(request_router_class=router),
    }
    try:
        if num_devices < num_replicas and not joins_cluster:  # other machines may join a cluster later
            raise ValueError(f"replicas={num_replicas}: this machine has {num_devices} {kind}s; each replica needs one")
        sizes = (config.memory if served.memory is None else served.memory for served in config.models.values())
        if kind == "CPU" and scale["max_replicas"] > 1 and not all(isinstance(size, int) for size in sizes):
            raise ValueError("replicas on CPUs share the machine's memory: give memory= in bytes")
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        replicas: Any = serve.deployment(Replica, **options)
        return Replicas(serve.run(replicas.bind(config, policies), name=name, route_prefix=None)), stop
    except RuntimeError as error:
        message = serve.status().applications[name].deployments["Replica"].message or str(error)
        stop()
        raise ValueError(f"no replica could start: {message.strip().splitlines()[-1]}") from error
    except BaseException:
        stop()
        raise
