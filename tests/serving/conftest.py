"""Servers in the tests' own process: real sockets, tiny models."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
import uvicorn
from conftest import TEXT_VOCAB_SIZE, build_stock, mixed_gates

from dmc import Engine, policies, retrofit
from dmc.budget import Budget
from dmc.data import train_tokenizer
from dmc.serving.answers import LocalService
from dmc.serving.config import Limits
from dmc.serving.server import make_app
from dmc.serving.worker import Worker

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools are known') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
POLICIES = {
    "full": None,
    "h2o": policies.H2O(budget=Budget(ratio=2)),
    "snapkv": policies.SnapKV(budget=Budget(ratio=2), window=4),
    "quest": policies.Quest(budget=Budget(ratio=2)),
}


@dataclass
class Served:
    """A server that runs, and what it serves."""

    url: str
    worker: Worker
    clients: list[Any] = field(default_factory=list)

    def client(self, **options: Any) -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, **options})
        self.clients.append(client)
        return client

    def wait_until_idle(self, seconds: float = 20) -> None:
        """Wait until nothing runs, and check that nothing is left."""
        end = time.monotonic() + seconds
        while any(self.worker.num_unfinished.values()):
            assert time.monotonic() < end, self.worker.num_unfinished
            time.sleep(0.01)
        assert not self.worker._jobs
        for engine in self.worker.engines.values():
            assert (engine.num_running, engine.num_waiting, engine.blocks_in_use) == (0, 0, 0)


@pytest.fixture(scope="session")
def text_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    text = "".join(f"line {i} <b>é\u00a0& {'x' * (i % 7)}</b>\n" for i in range(60))
    tokenizer = train_tokenizer([text], TEXT_VOCAB_SIZE, tmp_path_factory.mktemp("tokenizer"))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def make_server() -> Iterator[Callable[..., Served]]:
    """Return a function that serves engines until the tests end."""
    running: list[tuple[uvicorn.Server, threading.Thread, Served]] = []

    def start(
        engines: dict[str, Engine],
        max_waiting: int = 256,
        keys: tuple[str, ...] = (),
        caches: Any = None,
        **limits: Any,
    ) -> Served:
        worker = Worker(engines, max_waiting, caches=caches or {})
        app = make_app(LocalService(worker), keys, Limits(**limits))
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, daemon=True)
        worker.start()
        thread.start()
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        served = Served(f"http://127.0.0.1:{port}", worker)
        running.append((server, thread, served))
        return served

    yield start
    for server, thread, served in running:
        for client in served.clients:
            client.close()
        server.should_exit = True
        thread.join(20)
        served.worker.stop()


@pytest.fixture(scope="session")
def served(make_server: Callable[..., Served], text_tokenizer: Any) -> Served:
    """All kinds of caches behind one server; the stock ones share a model."""
    stock = build_stock(vocab_size=TEXT_VOCAB_SIZE, max_position_embeddings=512)
    learned = retrofit(build_stock(vocab_size=TEXT_VOCAB_SIZE, max_position_embeddings=512), mixed_gates())
    options: dict[str, Any] = {"max_batch_size": 8, "memory": 2**22, "prefix_cache": True}
    engines = {name: Engine(stock, text_tokenizer, policy, **options) for name, policy in POLICIES.items()}
    engines["own"] = Engine(learned, text_tokenizer, **options)
    return make_server(engines)
