"""The load generator against our server, and clients that break off, drop their connection or send nonsense."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import numpy
import pytest
from scripts_here import run_script

from dmc.results.load import LoadConfig, run_load, summarize
from dmc.results.plots import draw_load
from dmc.results.report import read_folders
from dmc.results.store import Store
from dmc.results.tables import loads_of


def test_every_request_and_token_is_counted(served, tmp_path):
    sizes = {"num_requests": 9, "concurrency": 4, "prompt_tokens": (3, 9), "new_tokens": (5, 5), "vocab_size": 200}
    store = Store(tmp_path / "cells.jsonl")
    rows = run_load(LoadConfig(served.url, "own", [40.0, None], **sizes), store.append)
    assert [row["policy"] for row in rows] == ["40 requests/s", "saturated"]
    for row in rows:
        metrics = row["metrics"]
        assert metrics["failed"] == 0
        assert metrics["tokens_per_second"] == pytest.approx(5 * metrics["requests_per_second"])
        first = [metrics[f"first_token_seconds_p{percent}"] for percent in (50, 95, 99)]
        assert 0 < first[0] <= first[1] <= first[2] <= metrics["request_seconds_p99"]
    assert rows[1]["metrics"].get("held_at_once", 0) <= 4
    assert len(Store(store.path).rows()) == 2
    served.wait_until_idle()


def test_a_curve_takes_the_median_of_each_rate():
    def row(name, rate, speed, seconds):
        metrics = {"tokens_per_second": speed, "request_seconds_p95": seconds}
        place = {} if rate is None else {"rate": rate}
        return {"model": name, "task": "load", "metrics": metrics, "coordinates": place}

    rows = [row("own", 2.0, 20.0, 1.0), row("own", 2.0, 22.0, 3.0), row("own", None, 90.0, 9.0)]
    plot = draw_load(loads_of([*rows, row("full", 2.0, 18.0, 2.0)]))
    assert [words for _, words in plot.tips.values()] == [
        "full, 2: 18.0 tokens/s, 95 % of requests end within (s): 2",
        "own, 2: 21.0 tokens/s, 95 % of requests end within (s): 2",
        "own, saturated: 90.0 tokens/s, 95 % of requests end within (s): 9",
    ]


def test_percentiles_are_those_of_a_naive_count():
    requests = [[1.0, 1.5, 1.6, 1.7, 1.8], [2.0, 4.0, 4.1, 4.2], [0.0, 0.5, 0.9]]
    found = summarize(requests, seconds=2.0)
    assert (found["requests_per_second"], found["tokens_per_second"]) == (1.5, 3.0)
    for percent in (50, 95, 99):
        assert found[f"first_token_seconds_p{percent}"] == pytest.approx(numpy.percentile([0.5, 2.0, 0.5], percent))
        assert found[f"token_seconds_p{percent}"] == pytest.approx(numpy.percentile([0.1, 0.1, 0.0], percent))
        assert found[f"request_seconds_p{percent}"] == pytest.approx(numpy.percentile([0.8, 2.2, 0.9], percent))


def test_the_script_prints_a_table_and_keeps_the_rows(served, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    little = "load.num_requests=3 load.prompt_tokens=[2,4] load.new_tokens=[3,4] load.vocab_size=200 load.model=h2o"
    command = ["benchmark.py", f"server={served.url}", *little.split(), "output=out"]
    assert run_script(*command, "load.rates=[30,null]") == ""
    shown = capsys.readouterr().out
    assert "30 requests/s" in shown and "token_seconds_p99" in shown
    assert len(Store(Path("out/cells.jsonl")).rows()) == 2
    assert run_script(*command, "load.seed=1") == ""
    found = read_folders([Path("out")])  # of several seeds and servers one curve
    assert len(found.loads) > 2 and not len(found.summary)
    for wrong, message in (
        ("server=localhost:8000", "server"),
        ("server=http://127.0.0.1:9", "does not answer"),
        (f"server={served.url} load.model=none", "does not answer: 404"),
        (f"server={served.url} load.new_tokens=[5,3]", "expected the minimum and the maximum"),
    ):
        error = run_script("benchmark.py", *wrong.split(), "load.num_requests=2", "output=out")
        assert message in error and "\n" not in error


def test_clients_that_go_away_or_send_nonsense_leave_nothing_behind(served):
    """Every answer that is read to its end is the one that the prompt gets alone."""
    prompts = [[index + 1, 2, 3] for index in range(4)]
    counts: dict[str, int] = {"answered": 0, "left": 0, "dropped": 0, "refused": 0}

    async def visit(client: httpx.AsyncClient, expected: list[str], draw: random.Random) -> None:
        for _ in range(6):
            number, kind = draw.randrange(len(prompts)), draw.choice([*counts])
            body: dict[str, Any] = {"model": "own", "prompt": prompts[number], "max_tokens": 30, "temperature": 0}
            if kind == "refused":
                answer = await client.post("/v1/completions", json={"prompt": [1.5]})
                assert answer.status_code == 400
            elif kind == "answered":
                answer = await client.post("/v1/completions", json=body)
                assert answer.json()["choices"][0]["text"] == expected[number]
            elif kind == "left":
                async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                    await anext(answer.aiter_lines())
            else:
                try:
                    await client.post("/v1/completions", json=body, timeout=0.02)
                except httpx.TimeoutException:
                    pass
            counts[kind] += 1

    async def crowd() -> None:
        async with httpx.AsyncClient(base_url=served.url, timeout=120) as client:
            bodies = [{"model": "own", "prompt": prompt, "max_tokens": 30, "temperature": 0} for prompt in prompts]
            answers = [await client.post("/v1/completions", json=body) for body in bodies]
            expected = [answer.json()["choices"][0]["text"] for answer in answers]
            await asyncio.gather(*(visit(client, expected, random.Random(seed)) for seed in range(16)))
            assert (await client.get("/health")).is_success

    asyncio.run(crowd())
    assert min(counts.values()) >= 5
    served.wait_until_idle(60)
    assert served.worker.failure is None
