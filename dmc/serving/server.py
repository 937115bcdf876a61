"""The process of a server: its address, and its end."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn

from dmc.serving.answers import LocalService
from dmc.serving.app import make_app
from dmc.serving.config import ServeConfig, make_worker


def serve(config: ServeConfig, policies: Path, started: Callable[[int], None] = lambda port: None) -> None:
    """Serve until SIGTERM or SIGINT; requests that are under way then have `grace_seconds` to end.

    Args:
        config: configuration of the server.
        policies: folder of the policies' settings.
        started: called with the port once the server answers.
    Raises:
        ValueError, OSError: see `make_worker`; the address is taken.
        ImportError: `replicas` is given, and Ray is not installed.
    """
    keys, is_first = config.keys(), os.environ.get("RANK", "0") == "0"
    place: Any = _bound(config.host, config.port) if is_first else None  # before models are loaded
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
    for each in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again in the end; the first rank ends others
        signal.signal(each, lambda *_: setattr(server, "should_exit", True))
    if worker is not None:
        (worker.start if is_first else worker.run)()
    if place is None:
        return
    try:
        place.listen(2048)
        started(place.getsockname()[1])
        server.run(sockets=[place])
    finally:
        stop()


def _bound(host: str, port: int) -> socket.socket:
    place = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        place.bind((host, port))
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port} ({error.strerror}): give another port=") from error
    return place
