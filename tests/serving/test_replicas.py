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

pytestmark = pytest.mark.ray
pytest.importorskip("ray.serve", reason="Ray is not installed: pip install '.[ray]'")

STREAMS = 12
NUM_CPUS = 3
"""One more than two replicas take."""


def replicas_of(process: subprocess.Popen) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if (child.cmdline() or [""])[0].startswith(("ray::SERVE_REPLICA", "ray::ServeReplica")):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture(scope="module")
def cluster(text_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen, str]]:
    folder = tmp_path_factory.mktemp("cluster")
    stock = build_stock(vocab_size=TEXT_VOCAB_SIZE, max_position_embeddings=512)
    learned = retrofit(build_stock(vocab_size=TEXT_VOCAB_SIZE, max_position_embeddings=512), mixed_gates())
    for name, model in (("full", stock), ("own", learned)):
        model.save_pretrained(folder / name)
        text_tokenizer.save_pretrained(folder / name)
    models = f"models={{own: {folder}/own, full: {folder}/full}}"
    command = [sys.executable, str(SCRIPTS / "serve.py"), models, "port=0", "memory=20000000", "replicas=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
    environment["RAY_OVERRIDE_RESOURCES"] = json.dumps({"CPU": NUM_CPUS})
    environment.pop("RAY_ADDRESS", None)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment)
    timer = threading.Timer(600, process.kill)
    timer.start()
    try:
        output = []
        for line in process.stderr or ():
            output.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+$", line):
                break
        else:
            raise AssertionError("".join(output))
        threading.Thread(target=lambda: [print(line, end="") for line in process.stderr or ()], daemon=True).start()
        yield process, found[0]
    finally:
        timer.cancel()
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()
        for child in children:
            if child.is_running():
                child.kill()


def counted(url: str, name: str) -> dict[str, float]:
    """Read a metric of each replica."""
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    matches = [re.fullmatch(rf'{re.escape(name)},replica="(\w+)"}} (\S+)', line) for line in lines]
    return {match[1]: float(match[2]) for match in matches if match}


def test_two_replicas_answer_as_one_engine(cluster: Any, text_tokenizer: Any) -> None:
    model = retrofit(build_stock(vocab_size=TEXT_VOCAB_SIZE, max_position_embeddings=512), mixed_gates())
    prompts = [f"line {index} <b>" for index in range(8)]
    expected = Engine(model, text_tokenizer).generate(prompts, SamplingParams(max_new_tokens=9, temperature=0))
    ray_mode = {replica.environ().get("RAY_AUTH_MODE") for replica in replicas_of(cluster[0])}
    assert ray_mode == {"token"}, "whoever reaches one of Ray's ports could run code"
    with httpx.Client(base_url=cluster[1], timeout=60) as web:
        assert web.get("/health").json() == {"status": "ok", "replicas": 2}
        assert [model["id"] for model in web.get("/v1/models").json()["data"]] == ["own", "full"]
        before = sum(counted(cluster[1], 'dmc_generated_tokens_total{model="own"').values())
        request = {"model": "own", "max_tokens": 9, "temperature": 0}
        for prompt, generation in zip(prompts, expected, strict=True):
            answer = web.post("/v1/completions", json={**request, "prompt": prompt})
            assert answer.json()["choices"][0]["text"] == generation.text
        wrong = web.post("/v1/completions", json={**request, "prompt": "x", "nonsense": 1})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (422, "nonsense")
        assert web.get("/v1/nothing").status_code == 404
        assert "text/html" in web.get("/").headers["content-type"]
    assert sum(counted(cluster[1], 'dmc_generated_tokens_total{model="own"').values()) == before + 72


def test_a_conversation_comes_back_to_the_replica_that_holds_it(cluster: Any) -> None:
    with httpx.Client(base_url=cluster[1], timeout=60) as web:
        for index in range(6):  # at random each of them would be found with a probability of one half
            prompt, messages = f"{index}" * 200, [{"role": "user", "content": f"{index}{index + 1}" * 100}]
            for turn in range(2):
                request = {"model": "full", "max_tokens": 4, "temperature": 0}
                answer = web.post("/v1/completions", json={**request, "prompt": prompt}).json()
                chat = web.post("/v1/chat/completions", json={**request, "messages": messages}).json()
                for response in (answer, chat):
                    assert (response["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == (turn > 0)
                prompt += answer["choices"][0]["text"] + "and"
                messages += [chat["choices"][0]["message"], {"role": "user", "content": "and"}]


def test_a_client_that_goes_away_takes_its_request_off(cluster: Any) -> None:
    request = {"model": "full", "prompt": "line", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=cluster[1], timeout=60) as web:
        with web.stream("POST", "/v1/completions", json=request) as answer:
            next(answer.iter_lines())
        end = time.monotonic() + 30
        while sum(counted(cluster[1], 'dmc_requests_total{finish_reason="abort",model="full"').values()) != 1:
            assert time.monotonic() < end
            time.sleep(0.2)


def test_a_second_server_on_the_cluster_that_cannot_start_says_why_and_leaves_the_first_alone(
    cluster: Any, tmp_path: Path
) -> None:
    process, url = cluster
    arguments = [word for child in psutil.Process(process.pid).children(recursive=True) for word in child.cmdline()]
    address = next(word.partition("=")[2] for word in arguments if word.startswith("--gcs-address="))
    environment = {**os.environ, "RAY_ADDRESS": address, "OMP_NUM_THREADS": "1"}
    environment |= {name: value for name, value in replicas_of(process)[0].environ().items() if "RAY_AUTH" in name}
    command = [sys.executable, str(SCRIPTS / "serve.py"), f"model={tmp_path}/nowhere", "port=0", "memory=9000000"]
    command += ["replicas=1", f"autoscaling.max_replicas={NUM_CPUS}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error: no replica could start: FileNotFoundError: there is no folder" in done.stderr
    assert httpx.get(f"{url}/health", timeout=30).json() == {"status": "ok", "replicas": 2}


def test_a_killed_replica_fails_its_own_requests_and_comes_back(cluster: Any) -> None:
    process, url = cluster
    request = {"model": "own", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    begun, ends = threading.Barrier(STREAMS + 1), {}

    def stream(index: int) -> None:
        body = {**request, "prompt": f"{index} line <b>", "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            begun.wait(60)
            ends[index] = [*lines][-1]

    def ask(index: int) -> None:
        ends[index] = httpx.post(f"{url}/v1/completions", json={**request, "prompt": f"{index} line <b>"}, timeout=120)

    threads = [threading.Thread(target=stream, args=(index,)) for index in range(STREAMS)]
    threads += [threading.Thread(target=ask, args=(index,)) for index in range(STREAMS, 2 * STREAMS)]
    for thread in threads:
        thread.start()
    begun.wait(60)
    before = counted(url, 'dmc_generated_tokens_total{model="own"')
    killed = replicas_of(process)[0]
    killed.kill()
    begin = time.monotonic()
    for thread in threads:
        thread.join(120)
    streams = [ends[index] for index in range(STREAMS)]
    lost = [json.loads(line.removeprefix("data: "))["error"] for line in streams if line != "data: [DONE]"]
    assert 0 < len(lost) < STREAMS
    assert {error["code"] for error in lost} == {"replica_lost"}
    answers = [ends[index] for index in range(STREAMS, 2 * STREAMS)]
    assert {answer.status_code for answer in answers} == {200, 503}
    for answer in answers:
        if answer.status_code == 503:
            assert answer.headers["retry-after"] == "1" and answer.json()["error"]["code"] == "replica_lost"
    assert httpx.post(f"{url}/v1/completions", json={**request, "prompt": "x", "max_tokens": 3}, timeout=60).is_success
    after = counted(url, 'dmc_generated_tokens_total{model="own"')
    (stayed,) = before.keys() & after.keys()
    assert after[stayed] > before[stayed]
    while httpx.get(f"{url}/health", timeout=30).json()["replicas"] < 2:
        assert time.monotonic() - begin < 300
        time.sleep(0.2)
    print(f"a killed replica was replaced after {time.monotonic() - begin:.1f} s")
    assert killed.pid not in [replica.pid for replica in replicas_of(process)]


def test_without_replicas_every_route_answers_503(cluster: Any) -> None:
    process, url = cluster
    for replica in replicas_of(process):
        replica.kill()
    for route in ("health", "metrics"):
        answer = httpx.get(f"{url}/{route}", timeout=30)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "engine_stopped"


def test_a_signal_ends_every_process(cluster: Any) -> None:
    process, _ = cluster
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    process.wait(90)
    psutil.wait_procs(children, timeout=30)
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
