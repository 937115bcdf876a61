"""Configuration of a server, and the engines that it asks for."""

from __future__ import annotations

import functools
import ipaddress
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, StrictBool, StrictFloat, StrictInt

from dmc.config.settings import Count, Named, NonNegative, Positive, build_config, checked_dataclass
from dmc.gguf import ModelName
from dmc.models.loading import load_tokenizer, load_with_tokenizer
from dmc.models.tensor_parallel import load_shard
from dmc.ranks import Ranks
from dmc.results.grid import named_settings
from dmc.results.policies import policy_from_config
from dmc.runtime import Engine
from dmc.runtime.options import EngineOptions
from dmc.serving.worker import Worker


@checked_dataclass(frozen=True)
class Limits:
    """Limits of what a client may send."""

    max_body_bytes: Count = 4 * 2**20
    body_seconds: Positive = 30.0
    """Seconds within which the body of a request must arrive."""
    log_prompts: StrictBool = False
    """Whether bodies with prompts are written to the log."""


@checked_dataclass(frozen=True)
class ServedModel:
    """A model, with its method and memory, that clients ask for by a name."""

    path: ModelName
    """Folder, hub name or GGUF file."""
    dtype: str = "auto"
    revision: str | None = None
    """Hub revision."""
    policy: Any = "full"
    """A file of `configs/policy`, or a mapping with `_target_`, or with `like` and options."""
    budget: Any = None
    """Budget of the policy: a ratio, or tokens:N."""
    memory: StrictInt | StrictFloat | str | None = None
    """Memory of its cache, see `Engine`; None: its share of what is free when it starts."""
    caches: Named[str] = field(default_factory=dict)
    """Folders that `Engine.save` has written, by the `cache_id` with which requests go on from them."""


@checked_dataclass(frozen=True)
class ServeConfig:
    """Configuration of a server: its models, address, keys, limits and replicas.

    Raises:
        ValueError: a value is out of range, or others could reach the server without a key.
        FileNotFoundError: a carried cache is missing.
    """

    models: Named[ServedModel]
    memory: StrictInt | StrictFloat | str | None = "auto"
    engine: dict[str, Any] = field(default_factory=dict)
    """Options of `Engine`."""
    limits: Limits = field(default_factory=Limits)
    host: str = "127.0.0.1"
    port: Annotated[StrictInt, Field(ge=0, le=65535)] = 8000
    api_key_file: str | None = None
    max_waiting: Count = 256
    grace_seconds: NonNegative = 30
    replicas: Count | None = None
    """Minimum number of Ray Serve processes, each with separate engines; None: serve from this process."""
    autoscaling: dict[str, Any] = field(default_factory=dict)
    """Options of Ray Serve's `AutoscalingConfig`, such as `max_replicas`."""

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("nothing to serve: give model=DIR, or models={name: DIR}")
        if self.replicas is not None and torch.distributed.is_torchelastic_launched():
            raise ValueError("replicas= starts its own processes, each with a full model: run it without torchrun")
        if self.replicas is None and (most := self.autoscaling.get("max_replicas")) is not None:
            raise ValueError(f"autoscaling.max_replicas={most} needs replicas=, the number that always runs")
        try:
            EngineOptions(**self.engine)
        except ValueError as error:
            raise ValueError(f"engine.{error}") from None
        for memory in (self.memory, *(served.memory for served in self.models.values())):
            EngineOptions(memory=memory)
        for folder in (folder for served in self.models.values() for folder in served.caches.values()):
            if not Path(folder).is_dir():
                raise FileNotFoundError(f"caches: {folder} holds no saved cache: there is no such folder")
        if self.api_key_file is None and not is_loopback(self.host):
            raise ValueError(
                f"host={self.host} is reachable from other machines, and anybody could use it; give api_key_file="
            )

    def keys(self) -> tuple[str, ...]:
        """Read the keys from `api_key_file`, one per line.

        Raises:
            OSError, ValueError: there is no such file, or nothing in it.
        """
        lines = [] if self.api_key_file is None else Path(self.api_key_file).read_text().splitlines()
        keys = tuple(filter(None, map(str.strip, lines)))
        if self.api_key_file is not None and not keys:
            raise ValueError(f"api_key_file={self.api_key_file} has no key: write one per line")
        return keys


OF_MODEL = ("policy", "budget", "name", "caches", "dtype", "revision")
"""Settings that describe `model`."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_config(values: dict[str, Any]) -> ServeConfig:
    """Build the configuration from settings of which `model`, `dtype`, `policy`, ... describe one model.

    Raises:
        ValueError: a setting is unknown or out of range, or describes no model.
    """
    values = dict(values)
    path, own = values.pop("model", None), {key: values.pop(key, None) for key in OF_MODEL}
    models = {
        key: {"path": model} if isinstance(model, str) else model for key, model in (values["models"] or {}).items()
    }
    if path:
        name = own.pop("name") or "-".join(part for part in Path(path).parts[-2:] if part != "/")
        if name in models:
            raise ValueError(f"model= and models= both have the name {name!r}: give name=")
        given = {key: value for key, value in own.items() if value not in (None, {})}
        models = {name: {"path": path, **given}, **models}
    elif lonely := [f"{key}=" for key, value in own.items() if value not in (None, {}, "auto")]:
        raise ValueError(f"{', '.join(lonely)} belong to model=DIR: give it, or write them into models=")
    return build_config(ServeConfig, values | {"models": models})


def make_worker(config: ServeConfig, policies: Path) -> Worker:
    """Load the models, each once, and build an engine for every name.

    Args:
        config: configuration of the server.
        policies: folder of the policies' settings.
    Raises:
        ValueError, OSError: see `load_with_tokenizer`, `policy_from_config`, `Engine` and `Engine.load`; a model has no
            tokenizer.
    """
    built = {}  # before anything is loaded
    for name, served in config.models.items():
        given = {"like": served.policy} if isinstance(served.policy, str) else served.policy
        (settings,) = named_settings([{"name": name, **given}], policies, f"models.{name}.policy").values()
        built[name] = policy_from_config(settings, served.budget)
    load, engines = functools.cache(_load), {}
    for name, served in config.models.items():
        model, tokenizer = load(served.path, served.dtype, served.revision)
        if tokenizer is None:
            raise ValueError(f"{served.path} has no tokenizer, and clients send text: add tokenizer.json")
        memory: Any = served.memory
        if memory is None:  # an equal share of the server's
            memory = f"auto/{len(built)}" if config.memory == "auto" else config.memory
            if isinstance(memory, int | float):
                memory = memory // len(built) if isinstance(memory, int) else memory / len(built)
        engines[name] = Engine(model, tokenizer, built[name], memory=memory, **config.engine)
    caches = {name: served.caches for name, served in config.models.items()}
    return Worker(engines, config.max_waiting, Ranks.new_gloo_group(), caches)


def _load(path: str, dtype: str, revision: str | None) -> tuple[Any, Any]:
    if not torch.distributed.is_torchelastic_launched():
        return load_with_tokenizer(path, dtype, revision)
    model = load_shard(path, dtype, revision=revision)
    return model, load_tokenizer(path, revision, model.config.vocab_size)
