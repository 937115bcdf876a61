"""Replicas under Ray Serve behind one address: answers are the engine's, and one that is killed takes few along."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from conftest import TEXT_VOCAB_SIZE, build_stock, mixed_gates
from scripts_here import SCRIPTS

from dmc import Engine, SamplingParams, retrofit

pytestmark = pytest.mark.slow
pytest.importorskip("ray.serve", reason="Ray is not installed: pip install '.[ray]'")
from dmc.serving.ray_app import Forwarded, added  # noqa: E402

STREAMS = 8


def replicas_of(process: subprocess.Popen) -> list[psutil.Process]:
    found = []
    for each in psutil.Process(process.pid).children(recursive=True):
        try:
            if (each.cmdline() or [""])[0].startswith(("ray::SERVE_REPLICA", "ray::ServeReplica")):
                found.append(each)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture(scope="module")
def cluster(text_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen, str]]:
    folder = tmp_path_factory.mktemp("cluster")
    stock = build_stock(vocab_size=TEXT_VOCAB_SIZE, max_position_embeddings=512)
    own = retrofit(build_stock(vocab_size=TEXT_VOCAB_SIZE, max_position_embeddings=512), mixed_gates())
    for name, model in (("full", stock), ("own", own)):
        model.save_pretrained(folder / name)
        text_tokenizer.save_pretrained(folder / name)
    models = f"models={{own: {folder}/own, full: {folder}/full}}"
    command = [sys.executable, str(SCRIPTS / "serve.py"), models, "port=0", "memory=20000000", "replicas=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment)
    timer = threading.Timer(600, process.kill)
    timer.start()
    try:
        said = []
        for line in process.stderr or ():
            said.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+$", line):
                break
        else:
            raise AssertionError("".join(said))
        threading.Thread(target=lambda: [print(line, end="") for line in process.stderr or ()], daemon=True).start()
        yield process, found[0]
    finally:
        timer.cancel()
        every = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()
        for each in every:
            if each.is_running():
                each.kill()


def test_a_folder_that_no_replica_finds_is_told_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "serve.py"), f"model={tmp_path}/nowhere", "port=0", "replicas=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error: no replica could start: FileNotFoundError: there is no folder" in done.stderr


def test_two_replicas_answer_as_one_engine(cluster: Any, text_tokenizer: Any) -> None:
    model = retrofit(build_stock(vocab_size=TEXT_VOCAB_SIZE, max_position_embeddings=512), mixed_gates())
    prompts = [f"line {index} <b>" for index in range(8)]
    expected = Engine(model, text_tokenizer).generate(prompts, SamplingParams(max_new_tokens=9, temperature=0))
    ray_mode = {each.environ().get("RAY_AUTH_MODE") for each in replicas_of(cluster[0])}
    assert ray_mode == {"token"}, "whoever reaches one of Ray's ports could run code"
    with httpx.Client(base_url=cluster[1], timeout=60) as web:
        assert web.get("/health").json() == {"status": "ok", "replicas": 2}
        assert [each["id"] for each in web.get("/v1/models").json()["data"]] == ["own", "full"]
        asked = {"model": "own", "max_tokens": 9, "temperature": 0}
        for prompt, generation in zip(prompts, expected, strict=True):
            answer = web.post("/v1/completions", json={**asked, "prompt": prompt})
            assert answer.json()["choices"][0]["text"] == generation.text
        wrong = web.post("/v1/completions", json={**asked, "prompt": "x", "nonsense": 1})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (422, "nonsense")
        assert web.get("/v1/nothing").status_code == 404
        assert "text/html" in web.get("/").headers["content-type"]
        told = web.get("/metrics").text.splitlines()
        assert any(line.startswith('dmc_generated_tokens_total{model="own"} 72') for line in told)


def test_a_conversation_comes_back_to_the_replica_that_holds_it(cluster: Any) -> None:
    with httpx.Client(base_url=cluster[1], timeout=60) as web:
        for index in range(6):  # at random each of them would be found with a probability of one half
            prompt = f"{index}" * 200
            for turn in range(2):
                asked = {"model": "full", "prompt": prompt, "max_tokens": 4, "temperature": 0}
                answer = web.post("/v1/completions", json=asked).json()
                reused = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert (reused > 0) == (turn > 0)
                prompt += answer["choices"][0]["text"] + "and"


def test_a_client_that_goes_away_takes_its_request_off(cluster: Any) -> None:
    asked = {"model": "full", "prompt": "line", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=cluster[1], timeout=60) as web:
        with web.stream("POST", "/v1/completions", json=asked) as answer:
            next(answer.iter_lines())
        end = time.monotonic() + 30
        while 'dmc_requests_total{finish_reason="abort",model="full"} 1' not in web.get("/metrics").text:
            assert time.monotonic() < end
            time.sleep(0.2)


def test_a_killed_replica_fails_its_own_requests_and_comes_back(cluster: Any) -> None:
    process, url = cluster
    asked = {"model": "own", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    begun, ends = threading.Barrier(STREAMS + 1), {}

    def stream(index: int) -> None:
        body = {**asked, "prompt": f"{index} line <b>", "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            begun.wait(60)
            ends[index] = [*lines][-1]

    def ask(index: int) -> None:
        ends[index] = httpx.post(f"{url}/v1/completions", json={**asked, "prompt": f"{index} line <b>"}, timeout=120)

    threads = [threading.Thread(target=stream, args=(index,)) for index in range(STREAMS)]
    threads += [threading.Thread(target=ask, args=(index,)) for index in range(STREAMS, 2 * STREAMS)]
    for thread in threads:
        thread.start()
    begun.wait(60)
    killed = replicas_of(process)[0]
    killed.kill()
    begin = time.monotonic()
    for thread in threads:
        thread.join(120)
    streams = [ends[index] for index in range(STREAMS)]
    lost = [json.loads(each.removeprefix("data: "))["error"] for each in streams if each != "data: [DONE]"]
    assert 0 < len(lost) < STREAMS
    assert {each["code"] for each in lost} == {"replica_lost"}
    answers = [ends[index] for index in range(STREAMS, 2 * STREAMS)]
    assert {each.status_code for each in answers} == {200, 503}
    for each in answers:
        if each.status_code == 503:
            assert each.headers["retry-after"] == "1" and each.json()["error"]["code"] == "replica_lost"
    assert httpx.post(f"{url}/v1/completions", json={**asked, "prompt": "x", "max_tokens": 3}, timeout=60).is_success
    while httpx.get(f"{url}/health", timeout=30).json()["replicas"] < 2:
        assert time.monotonic() - begin < 180
        time.sleep(0.2)
    print(f"a killed replica was replaced after {time.monotonic() - begin:.1f} s")
    assert killed.pid not in [each.pid for each in replicas_of(process)]


def test_it_ends_when_told(cluster: Any) -> None:
    process, _ = cluster
    every = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    process.wait(90)
    psutil.wait_procs(every, timeout=30)
    assert not [each for each in every if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def test_beginnings_are_those_that_the_next_turn_has_too() -> None:
    def beginnings(*said: str) -> list[int]:
        messages = [{"role": "user", "content": each} for each in said]
        return Forwarded("POST", "/", json.dumps({"model": "m", "messages": messages}).encode()).beginnings()

    first, second, other = beginnings("a" * 300), beginnings("a" * 300, "b" * 300), beginnings("b" * 300)
    assert set(first) < set(second)
    assert second[-len(first) :] == first  # the longest comes first
    assert not set(first) & set(other)
    for body in (b"", b"[]", b"{", b"\xff", b'{"prompt": 3}', b"[" * 100000):
        assert Forwarded("POST", "/", body).beginnings() == []


def test_counts_of_processes_add_up() -> None:
    one = '# HELP a Some.\n# TYPE a counter\na{model="m n"} 1.0\nb 2.0\n'
    two = '# HELP a Some.\n# TYPE a counter\na{model="m n"} 0.5\nb 1e3\nc +Inf\n'
    assert added([one, two]) == '# HELP a Some.\n# TYPE a counter\na{model="m n"} 1.5\nb 1002.0\nc inf\n'
