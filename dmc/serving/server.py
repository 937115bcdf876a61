"""A server from its settings: models, engines, the worker, and the address."""

from __future__ import annotations

import ipaddress
import logging
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import uvicorn

from dmc.config import build_config
from dmc.loading import load_tokenizer, load_with_tokenizer
from dmc.models.tensor_parallel import load_shard
from dmc.policies.from_config import policy_from_config
from dmc.ranks import Ranks
from dmc.results.grid import named_settings
from dmc.runtime import Engine
from dmc.runtime.memory import free_bytes
from dmc.serving.app import Limits, make_app
from dmc.serving.metrics import Metrics
from dmc.serving.worker import Worker

AUTO_FRACTION = 0.5
"""Of the free memory, what "auto" shares among several names."""


@dataclass(frozen=True)
class ServedModel:
    """A name that clients may ask for."""

    path: str
    dtype: str = "auto"
    revision: str | None = None
    policy: Any = "full"
    """A file of `configs/policy`, or a mapping with `_target_`, or with `like` and options."""
    budget: Any = None
    memory: int | float | str | None = None
    """Of its cache; None: an equal share of the server's."""


@dataclass(frozen=True)
class EngineOptions:
    """See `Engine`."""

    block_size: int = 16
    kernels: str = "auto"
    max_batch_size: int = 64
    prefill_chunk_size: int | None = None
    token_budget: int | None = 2048
    prefix_cache: bool = True


@dataclass(frozen=True)
class ServeConfig:
    """What to serve, and to whom.

    Raises:
        ValueError: a value is out of range, or others could reach the server without a key.
    """

    models: dict[str, Any]
    """Name: folder or hub name, or a mapping with the fields of `ServedModel`."""
    memory: int | float | str | None = "auto"
    engine: EngineOptions = field(default_factory=EngineOptions)
    limits: Limits = field(default_factory=Limits)
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: str | None = None
    max_waiting: int = 256
    grace_seconds: int = 30
    replicas: int | None = None
    """Processes of Ray Serve, each with engines of its own; None: this process."""
    max_replicas: int | None = None
    """As many are started when requests wait; None: no more than `replicas`."""
    target_ongoing_requests: float = 32.0
    """Requests under way for each replica, beyond which one more is started."""

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("nothing to serve: give model=DIR, or models={name: DIR}")
        for name, least in (("port", 0), ("max_waiting", 0), ("grace_seconds", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: expected a whole number >= {least}")
        number, most = self.replicas, self.max_replicas
        if (number is None and most is not None) or (number is not None and not 1 <= number <= (most or number)):
            raise ValueError(f"replicas={number} max_replicas={most}: expected 1 <= replicas <= max_replicas")
        if not self.target_ongoing_requests > 0:
            raise ValueError(f"target_ongoing_requests={self.target_ongoing_requests}: expected a number > 0")
        if self.replicas is not None and torch.distributed.is_torchelastic_launched():
            raise ValueError("replicas= starts processes itself, each with a whole model: leave torchrun out")
        if self.port > 65535:
            raise ValueError(f"port={self.port}: expected at most 65535")
        if self.limits.max_body_bytes < 1 or not self.limits.body_seconds > 0:
            raise ValueError("limits: expected max_body_bytes and body_seconds > 0")
        if self.api_key_file is None and not is_loopback(self.host):
            raise ValueError(f"host={self.host}: others can reach it, and anybody could use it; give api_key_file=")

    def keys(self) -> tuple[str, ...]:
        """Read the keys, one a line.

        Raises:
            OSError, ValueError: there is no such file, or nothing in it.
        """
        if self.api_key_file is None:
            return ()
        found = tuple(filter(None, (line.strip() for line in Path(self.api_key_file).read_text().splitlines())))
        if not found:
            raise ValueError(f"api_key_file={self.api_key_file} has no key: write one a line")
        return found


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_config(values: dict[str, Any]) -> ServeConfig:
    """Build the configuration from settings, in which `model`, `policy` and `budget` are those of one name."""
    values = dict(values)
    model, policy, budget, name = (values.pop(each, None) for each in ("model", "policy", "budget", "name"))
    models = dict(values.get("models") or {})
    if model and model.get("path"):
        named = name or "-".join(part for part in Path(model["path"]).parts[-2:] if part != "/")
        models = {named: model | {"policy": policy or "full", "budget": budget}, **models}
    elif budget is not None or policy:
        raise ValueError("policy= and budget= are those of model=DIR: give it, or write them into models=")
    return build_config(ServeConfig, values | {"models": models})


def make_worker(config: ServeConfig, policies: Path) -> Worker:
    """Load the models, each once, and build an engine for every name.

    Args:
        config: what to serve.
        policies: folder of their settings.
    Raises:
        ValueError, OSError: see `load_model`, `policy_from_config` and `Engine`; a model has no tokenizer.
    """
    served = {
        name: build_config(ServedModel, {"path": each} if isinstance(each, str) else each, f"models.{name}")
        for name, each in config.models.items()
    }
    built = {}  # before anything is loaded
    for name, each in served.items():
        is_name = isinstance(each.policy, str)
        entry = {"name": each.policy, "like": each.policy} if is_name else {"name": name, **each.policy}
        ((_, settings),) = named_settings([entry], policies, f"models.{name}.policy").items()
        built[name] = policy_from_config(settings, each.budget)
    loaded: dict[Any, Any] = {}
    engines = {}
    group = Ranks()
    for name, each in served.items():
        place = (each.path, each.dtype, each.revision)
        model, tokenizer = loaded[place] if place in loaded else loaded.setdefault(place, _load(*place))
        if tokenizer is None:
            raise ValueError(f"{each.path} has no tokenizer, and clients send text: add tokenizer.json")
        memory = each.memory if each.memory is not None else _share(config.memory, len(served), model)
        engines[name] = Engine(model, tokenizer, built[name], memory=memory, **asdict(config.engine))
    if torch.distributed.is_torchelastic_launched():
        group = Ranks.on_hosts()
    return Worker(engines, config.max_waiting, Metrics(engines), group)


def _load(path: str, dtype: str, revision: str | None) -> tuple[Any, Any]:
    if not torch.distributed.is_torchelastic_launched():
        return load_with_tokenizer(path, dtype, revision)
    model = load_shard(path, None if dtype == "auto" else getattr(torch, dtype))
    return model, load_tokenizer(path, revision, model.config.vocab_size)


def _share(memory: int | float | str | None, num_names: int, model: Any) -> int | float | str | None:
    if num_names == 1 or memory is None:
        return memory
    if isinstance(memory, int):
        return memory // num_names
    fraction = AUTO_FRACTION if memory == "auto" else memory
    if not isinstance(fraction, float):
        return memory  # which the engine refuses
    return int(fraction * free_bytes(next(model.parameters()).device)) // num_names


def serve(config: ServeConfig, policies: Path, started: Callable[[int], None] = lambda port: None) -> None:
    """Serve until a signal; what runs then ends within the grace period.

    Args:
        config: what to serve.
        policies: folder of their settings.
        started: is told the port when it listens.
    """
    keys = config.keys()
    worker = None
    if config.replicas is None:
        worker = make_worker(config, policies)
        app, stop = make_app(worker, keys, config.limits), worker.stop
    else:
        try:
            from dmc.serving import ray_app
        except ImportError as error:
            raise ImportError(f"replicas= needs Ray ({error}): pip install 'dmc-retrofit[ray]'") from error
        app, stop = ray_app.start(config, policies, keys)
    for each in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again in the end; the first rank ends others
        signal.signal(each, lambda *_: None)
    if worker is not None and worker.ranks.rank:
        worker.run()
        return
    server = Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            log_level=logging.WARNING,
            access_log=False,
            timeout_graceful_shutdown=config.grace_seconds,
            server_header=False,
        )
    )
    server.started_at = started
    if worker is not None:
        worker.start()
    try:
        server.run()
    finally:
        stop()
    if not server.started:
        raise OSError(f"cannot listen on {config.host}:{config.port}: give another port=")


class Server(uvicorn.Server):
    """Tells the port that it listens on."""

    started_at: Callable[[int], None]

    async def startup(self, sockets: Any = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        if self.started:
            self.started_at(self.servers[0].sockets[0].getsockname()[1])
