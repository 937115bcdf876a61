"""The load generator against our own server: what it counts is what came."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
from scripts_here import run_script

from dmc.results.load import LoadConfig, Visit, percentile, run_load, summarize
from dmc.results.plots import draw_load
from dmc.results.report import read_folders
from dmc.results.store import Store
from dmc.results.tables import loads_of


def test_every_request_and_token_is_counted(served, tmp_path):
    config = LoadConfig(
        f"{served.url}/v1",
        "own",
        [40.0, None],
        9,
        4,
        (3, 9),
        (5, 5),
        vocab_size=200,
        first_seconds=60,
        token_seconds=60,
    )
    store = Store(tmp_path / "cells.jsonl")
    rows = run_load(config, store.append)
    assert [row["policy"] for row in rows] == ["40 requests/s", "saturated"]
    for row in rows:
        metrics = row["metrics"]
        assert metrics["failed"] == 0
        assert metrics["tokens_per_second"] == pytest.approx(5 * metrics["requests_per_second"])
        assert metrics["goodput"] == metrics["requests_per_second"] > 0
        assert (
            0
            < metrics["first_token_seconds_p50"]
            <= metrics["first_token_seconds_p95"]
            <= metrics["first_token_seconds_p99"]
        )
    assert rows[1]["metrics"]["held_at_once"] <= 4
    assert len(Store(store.path).rows()) == 2
    served.wait_until_idle()


def test_a_curve_takes_the_median_of_each_rate():
    def row(name, rate, speed, seconds):
        metrics = {"tokens_per_second": speed, "request_seconds_p95": seconds}
        return {
            "model": name,
            "task": "load",
            "metrics": metrics,
            "coordinates": {} if rate is None else {"rate": rate},
        }

    rows = [row("own", 2.0, 20.0, 1.0), row("own", 2.0, 22.0, 3.0), row("own", None, 90.0, 9.0)]
    rows += [row("full", 2.0, 18.0, 2.0), {"model": "own", "task": "load", "metrics": {"wrong": 0}}]
    plot = draw_load(loads_of(rows))
    told = [words for _, words in plot.tips.values()]
    assert told == [
        "full, 2: 18.0 tokens/s, 95 % of requests end within (s): 2",
        "own, 2: 21.0 tokens/s, 95 % of requests end within (s): 2",
        "own, saturated: 90.0 tokens/s, 95 % of requests end within (s): 9",
    ]


def test_percentiles_and_goodput_are_those_of_a_naive_count():
    config = LoadConfig("http://x", first_seconds=1.0, token_seconds=0.1)
    visits = [Visit(1.0, [1.5, 1.6, 1.7]), Visit(2.0, [4.0, 4.1]), Visit(0.0, [0.5, 0.9]), Visit(3.0, error="503")]
    found = summarize(visits, config, seconds=2.0)
    assert (found["failed"], found["requests_per_second"], found["tokens_per_second"]) == (1, 1.5, 3.5)
    assert found["goodput"] == 0.5
    values = [0.5, 2.0, 0.5, 7.0, 1.25]
    for percent in (50, 95, 99):
        assert percentile(values, percent) == pytest.approx(numpy.percentile(values, percent))
    assert percentile([3.0], 99) == 3.0


def test_the_script_prints_a_table_and_keeps_the_rows(served, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    little = "load.num_requests=3 load.prompt_tokens=[2,4] load.new_tokens=[3,4] load.vocab_size=200 load.model=h2o"
    assert (
        run_script("benchmark.py", f"server={served.url}", *little.split(), "load.rates=[30,null]", "output=out") == ""
    )
    shown = capsys.readouterr().out
    assert "30 requests/s" in shown and "token_seconds_p99" in shown
    assert len(Store(Path("out/cells.jsonl")).rows()) == 2
    assert run_script("benchmark.py", f"server={served.url}", *little.split(), "load.seed=1", "output=out") == ""
    found = read_folders([Path("out")])  # of several seeds and servers one curve
    assert len(found.loads) > 2 and not len(found.summary)
    for wrong, message in (
        ("server=localhost:8000", "expected an address such as http"),
        ("server=http://127.0.0.1:9", "lists no models"),
        (f"server={served.url} load.model=none", "answers no request: 404"),
        (f"server={served.url} load.crowd_seconds=0", "crowd_seconds=0: expected greater than 0"),
        (f"server={served.url} load.rates=[0]", "rates[0]=0: expected greater than 0"),
        (f"server={served.url} load.new_tokens=[5,3]", "expected the least and the most"),
    ):
        error = run_script("benchmark.py", *wrong.split(), "load.num_requests=2", "output=out")
        assert message in error and "\n" not in error
