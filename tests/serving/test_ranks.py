"""One server in front of several ranks: their tokens are those of one process, their steps those of the first."""

from __future__ import annotations

import asyncio
import os
import pickle
import queue
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import build_stock
from scripts_here import SCRIPTS
from transformers import AutoTokenizer

from dmc import Engine, SamplingParams, load_model
from dmc.ranks import Ranks
from dmc.runtime import Generation
from dmc.serving.requests import APIError
from dmc.serving.worker import Job, Worker


def test_another_rank_makes_the_steps_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads in place of two processes, a queue in place of the collective."""
    sent: queue.Queue[bytes] = queue.Queue()
    first, other = (Worker({"own": Engine(build_stock())}, 4, Ranks(rank, 2)) for rank in range(2))
    tokens: dict[Worker, list[list[int]]] = {first: [], other: []}

    def broadcast(box: list[Any], src: int, group: Any) -> None:
        if threading.current_thread() is first._thread:
            sent.put(pickle.dumps(box[0]))
        else:
            box[0] = pickle.loads(sent.get(timeout=20))

    def watch(worker: Worker) -> None:
        engine = worker.engines["own"]
        step = engine.step

        def noted() -> list[Any]:
            events = step()
            tokens[worker].append([event.token_id for event in events])
            return events

        engine.step = noted  # type: ignore[method-assign]

    monkeypatch.setattr("dmc.serving.worker.dist.broadcast_object_list", broadcast)
    for worker in (first, other):
        watch(worker)
        worker.start()

    async def ask() -> dict[int, Any]:
        news: asyncio.Queue[Any] = asyncio.Queue()
        long = SamplingParams(max_new_tokens=2000, temperature=0)
        few = SamplingParams(max_new_tokens=9, temperature=0)
        given = [([1, 2, 3], few), ([4], few), ([5, 6], long), ([83_000], few)]
        jobs = [
            Job("own", prompt, params, index, news, asyncio.get_running_loop())
            for index, (prompt, params) in enumerate(given)
        ]
        first.submit(jobs)
        ended: dict[int, Any] = {}
        while len(ended) < len(jobs):
            job, event = await asyncio.wait_for(news.get(), 20)
            if isinstance(event, Generation | APIError):
                ended[job.index] = event
                first.abort([jobs[2]])
        return ended

    ended = asyncio.run(ask())
    first.stop()
    other._thread.join(20)
    assert not first._thread.is_alive() and not other._thread.is_alive()
    alone = Engine(build_stock()).generate([[1, 2, 3], [4]], SamplingParams(max_new_tokens=9, temperature=0))
    assert [ended[index].token_ids for index in range(2)] == [generation.token_ids for generation in alone]
    assert "was aborted" in str(ended[2]) and "83000" in str(ended[3])
    assert tokens[first] == tokens[other] and len(tokens[first]) >= 9
    assert not other._jobs and other.engines["own"].blocks_in_use == 0


@pytest.mark.slow
def test_two_ranks_answer_as_one(folders: Any, tmp_path: Path) -> None:
    model, tokenizer = load_model(folders.compressed), AutoTokenizer.from_pretrained(folders.compressed)
    prompts = [f"line {index} <b>" for index in range(5)]
    expected = Engine(model, tokenizer).generate(prompts, SamplingParams(max_new_tokens=9, temperature=0))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(SCRIPTS / "serve.py"), f"model={folders.compressed}", "name=own", "port=0", "memory=20000000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment)
    try:
        assert process.stderr is not None
        url = next(found[0] for line in process.stderr if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        with httpx.Client(base_url=url, timeout=120) as web:
            request = {"model": "own", "prompt": prompts, "max_tokens": 9, "temperature": 0}
            answer = web.post("/v1/completions", json=request).json()
            assert [choice["text"] for choice in answer["choices"]] == [generation.text for generation in expected]
            drawn = {**request, "prompt": "line", "temperature": 1.0, "n": 3}  # without a seed the ranks agree on one
            assert web.post("/v1/completions", json=drawn).json()["usage"]["completion_tokens"] == 27
            assert web.post("/v1/completions", json={**request, "prompt": ""}).status_code == 400
            with web.stream("POST", "/v1/completions", json={**request, "stream": True, "max_tokens": 300}) as stream:
                next(stream.iter_lines())  # and goes away
            again = web.post("/v1/completions", json=request).json()
            assert [choice["text"] for choice in again["choices"]] == [generation.text for generation in expected]
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
