"""The command: what it refuses to start with, how it starts, and how it stops."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripts_here import SCRIPTS, run_script

from dmc.serving.config import is_loopback, make_worker, read_config
from dmc.serving.server import serve

REFUSED = [
    ("", "nothing to serve: give model=DIR, or models="),
    ("policy=h2o budget=4", "policy=, budget= belong to model=DIR: give it, or write them into models="),
    ("caches={{corpus:x}}", "caches= belong to model=DIR"),
    ("name=own dtype=bfloat16 revision=v2", "name=, dtype=, revision= belong to model=DIR"),
    ("model={stock} name=own models={{own:{compressed}}}", "model= and models= both have the name 'own': give name="),
    ("model={stock} autoscaling.max_replicas=4", "autoscaling.max_replicas=4 needs replicas="),
    ("model={stock} caches={{corpus:nowhere}}", "nowhere holds no saved cache"),
    ("model={stock} policy=h2o", "needs a budget"),
    ("model={stock} budget=4", "budget=4 needs a policy"),
    (
        "model={stock} host=0.0.0.0",
        "host=0.0.0.0 is reachable from other machines, and anybody could use it; give api_key_file=",
    ),
    ("model={stock} host=::", "reachable from other machines"),
    ("model={stock} host=example.org", "reachable from other machines"),
    ("model={stock} port=70000", "port=70000: expected less than or equal to 65535"),
    ("model={stock} port=-1", "port=-1: expected greater than or equal to 0"),
    ("model={stock} api_key_file=nowhere", "nowhere"),
    ("model={stock} api_key_file={empty}", "has no key: write one per line"),
    ("models={{a: {{path: {stock}, polcy: h2o}}}}", "unknown setting models.a.polcy"),
    ("models={{a: {{path: {stock}, policy: h3o, budget: 4}}}}", "h3o"),
    ("model={compressed} policy=h2o budget=4", "decide token by token"),
    ("model={stock} memory=-5", "memory=-5: expected greater than 0"),
    ("model={stock} engine.max_batch_size=0", "max_batch_size=0"),
    ("model={stock} limits.max_body_bytes=0", "limits.max_body_bytes=0: expected greater than or equal to 1"),
    ("model={stock} max_waiting=0", "max_waiting=0"),
    ("model={stock} port={taken}", "cannot listen on 127.0.0.1:{taken} (Address already in use"),
    ("model={stock} replicas=0", "replicas=0: expected greater than or equal to 1"),
]


def test_a_wrong_command_ends_in_one_line(folders: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n \n")
    places: dict[str, Any] = {"stock": folders.stock, "compressed": folders.compressed, "empty": tmp_path / "empty"}
    with socket.create_server(("127.0.0.1", 0)) as other:
        places["taken"] = other.getsockname()[1]
        for arguments, message in REFUSED:
            given = arguments.format(**places)
            error = run_script("serve.py", *([given] if given.startswith("models=") else given.split()))
            assert message.replace("{taken}", str(places["taken"])) in error
            assert error.startswith("error: ") and "\n" not in error


def test_a_name_is_the_end_of_its_path() -> None:
    config = read_config({"model": "outputs/base/final", "models": {"other": "x"}})
    assert list(config.models) == ["base-final", "other"]
    assert config.models["base-final"].policy == "full"
    assert is_loopback("127.0.0.9") and is_loopback("::1") and not is_loopback("192.168.0.1")


def test_models_share_the_free_memory(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmc.runtime.pool_size.free_bytes", lambda device: 2**24)

    def num_blocks(count: int, **settings: Any) -> list[int]:
        models = {f"{index}": str(folders.stock) for index in range(count)}
        config = read_config({"models": models, **settings})
        engines = make_worker(config, SCRIPTS.parent / "configs" / "policy").engines
        return [engine.cache.allocator.num_blocks for engine in engines.values()]

    for settings in ({"memory": "auto"}, {"memory": 0.5}):
        (alone,) = num_blocks(1, **settings)
        assert num_blocks(2, **settings) == [pytest.approx(alone / 2, rel=0.1)] * 2


def test_a_signal_at_the_start_ends_the_server(folders: Any) -> None:
    config = read_config({"model": str(folders.stock), "models": None, "port": 0, "memory": 2**22})
    before, ports = signal.getsignal(signal.SIGTERM), []
    try:
        serve(
            config, SCRIPTS.parent / "configs" / "policy", lambda port: ports.append(port) or os.kill(os.getpid(), 15)
        )
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{ports[0]}/health")


def test_streams_end_with_the_grace_period(folders: Any, capfd: Any) -> None:
    models = {"own": str(folders.compressed)}
    config = read_config({"models": models, "port": 0, "memory": 2**22, "grace_seconds": 0})
    handlers, lines = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}, []

    def ask(port: int) -> None:
        request = {"model": "own", "prompt": "line", "max_tokens": 400, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=request, timeout=60) as answer:
            try:
                for line in answer.iter_lines():
                    if not lines:
                        os.kill(os.getpid(), signal.SIGTERM)
                    lines.append(line)
            except httpx.RemoteProtocolError:
                lines.append("broken off")

    threads: list[threading.Thread] = []

    def started(port: int) -> None:
        threads.append(threading.Thread(target=ask, args=(port,)))
        threads[0].start()

    try:
        serve(config, SCRIPTS.parent / "configs" / "policy", started)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    threads[0].join(20)
    assert lines[-1] == "broken off" and "data: [DONE]" not in lines
    assert "Traceback" not in capfd.readouterr().err


def test_a_server_finishes_running_requests_and_exits(folders: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    models = f"models={{own: {folders.compressed}, h2o: {{path: {folders.stock}, policy: h2o, budget: 4}}}}"
    command = [sys.executable, str(SCRIPTS / "serve.py"), models, "port=0", "memory=20000000", f"api_key_file={keys}"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    output: list[str] = []
    try:
        assert process.stderr is not None
        for line in process.stderr:
            output.append(line)
            if found := re.search(r"^own, h2o: (http://127\.0\.0\.1:\d+)$", line):
                break
        else:
            raise AssertionError("".join(output))
        threading.Thread(target=lambda: output.extend(process.stderr), daemon=True).start()
        with httpx.Client(base_url=found[1], headers={"Authorization": "Bearer secret"}, timeout=60) as web:
            assert [card["id"] for card in web.get("/v1/models").json()["data"]] == ["own", "h2o"]
            for name in ("own", "h2o"):
                request = {"model": name, "prompt": "a secret prompt", "max_tokens": 3}
                assert web.post("/v1/completions", json=request).json()["usage"]["completion_tokens"] == 3
            request = {"model": "own", "prompt": "line", "max_tokens": 400, "stream": True, "ignore_eos": True}
            with web.stream("POST", "/v1/completions", json=request) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert len(rest) == 400
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert process.wait(30) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{found[1]}/health")
    finally:
        process.kill()
    assert "secret" not in "".join(output)
