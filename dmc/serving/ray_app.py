"""Replicas under Ray Serve, each with engines of its own, and the service that hands requests out to them."""

from __future__ import annotations

import contextlib
import json
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
from dmc.serving.requests import APIError

BEGINNING = 128
"""Characters or tokens of a prompt by which later ones are recognized as the same conversation."""


def conversation_of(body: bytes) -> str:
    """Return a conversation's name: a hash of the messages up to the user's first, or of a prompt's beginning."""
    try:
        asked = json.loads(body)
        said = (asked.get("messages") or asked["prompt"])[:BEGINNING]
        users = (index for index, each in enumerate(said) if isinstance(each, dict) and each.get("role") == "user")
        return str(hash(json.dumps([asked.get("model"), said[: next(users, BEGINNING) + 1]])))
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):  # the replica says what is wrong
        return ""


class Replica(LocalService):
    """Answers from the engines of one process; requests reach it through Ray, not through a socket."""

    def __init__(self, config: ServeConfig, policies: Path) -> None:
        super().__init__(make_worker(config, policies))
        self.worker.start()

    async def answer(self, path: str, body: bytes) -> AsyncIterator[Any]:
        """Yield the pieces of an answer, and the error that ends them: Ray would wrap one that is raised."""
        own: Any = super().answer(path, body)
        async with contextlib.aclosing(own) as pieces:
            try:
                async for piece in pieces:
                    yield piece
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

    async def answer(self, path: str, body: bytes) -> AsyncIterator[str]:
        """Yield the pieces of an answer.

        Raises:
            APIError: the request is wrong, all replicas are busy, or its replica has died.
        """
        options = {"method_name": "answer", "stream": True, "session_id": conversation_of(body)}
        pieces = self._handle.options(**options).remote(path, body)
        try:
            async for piece in pieces:
                if isinstance(piece, APIError):
                    raise piece
                yield piece
        except BackPressureError as error:
            raise APIError(429, "all replicas are busy", None, "rate_limit_exceeded") from error
        except (RayError, RayServeException) as error:
            told = "the replica that had this request has died: send it again"
            raise APIError(503, told, None, "replica_lost") from error
        finally:
            pieces.cancel()

    async def health(self) -> dict[str, Any]:
        """Count the replicas that answer."""
        return {"status": "ok", "replicas": len(await self._ask_all("health"))}

    async def metrics(self) -> dict[str, list[Metric]]:
        """Return the metrics of each replica by its name."""
        return {name: each for told in await self._ask_all("metrics") for name, each in told.items()}

    async def _ask_all(self, method: str) -> list[Any]:
        """Call a method of every replica, past the queue; return the results of those that answer."""
        try:
            told = await self._handle.broadcast(method).results_async(timeout_s=10, return_exceptions=True)
        except (RayServeException, TimeoutError):
            told = []
        if found := [each for each in told if not isinstance(each, BaseException)]:
            return found
        raise APIError(503, "no replica runs, or all of them hang", None, "engine_stopped")


def start(config: ServeConfig, policies: Path) -> tuple[Replicas, Callable[[], None]]:
    """Start replicas on the cluster of RAY_ADDRESS, or on this machine.

    Returns:
        The service that hands requests out to them, and what ends them.
    Raises:
        ValueError: this machine has not as many devices, autoscaling is wrong, or no replica can start.
    """
    least = config.replicas or 1
    scale: dict[str, Any] = {"min_replicas": least, "max_replicas": least}
    scale |= {option: value for option, value in config.autoscaling.items() if value is not None}
    try:
        AutoscalingConfig(**scale)
    except ValidationError as error:
        raise ValueError(f"autoscaling={scale}: {error.errors()[0]['msg']}") from error
    if unknown := scale.keys() - AutoscalingConfig.model_fields.keys():
        raise ValueError(f"unknown setting autoscaling.{min(unknown)}: Ray Serve's AutoscalingConfig has none")
    joins = "RAY_ADDRESS" in os.environ
    local: dict[str, Any] = {} if joins else {"address": "local", "include_dashboard": False}
    ray.init(**local, log_to_driver=False, logging_level=logging.ERROR)
    name = f"dmc-{uuid.uuid4().hex[:8]}"  # others may serve on this cluster

    def stop() -> None:
        serve.delete(name) if joins else serve.shutdown()
        ray.shutdown()

    kind = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
    number = int(ray.cluster_resources().get(kind, 0))
    router: Any = ConsistentHashRouter
    options: dict[str, Any] = {
        "autoscaling_config": scale,
        "ray_actor_options": {f"num_{kind.lower()}s": 1 if kind == "GPU" else max(1, number // scale["max_replicas"])},
        "max_ongoing_requests": config.engine.get("max_batch_size", 32) * len(config.models),  # more would wait behind
        "max_queued_requests": config.max_waiting,
        "health_check_period_s": 2,
        "graceful_shutdown_timeout_s": config.grace_seconds,
        "max_constructor_retry_count": 2,
        "request_router_config": RequestRouterConfig(request_router_class=router),
    }
    try:
        if number < least and not joins:  # other machines may join a cluster later
            raise ValueError(f"replicas={least}: this machine has {number} {kind}s, and each needs one")
        shares = (config.memory if each.memory is None else each.memory for each in config.models.values())
        if kind == "CPU" and scale["max_replicas"] > 1 and not all(isinstance(each, int) for each in shares):
            raise ValueError("replicas on CPUs know nothing of each other's memory: give memory= in bytes")
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        replicas: Any = serve.deployment(Replica, **options)
        return Replicas(serve.run(replicas.bind(config, policies), name=name, route_prefix=None)), stop
    except RuntimeError as error:
        told = serve.status().applications[name].deployments["Replica"].message or str(error)
        stop()
        raise ValueError(f"no replica could start: {told.strip().splitlines()[-1]}") from error
    except BaseException:
        stop()
        raise
