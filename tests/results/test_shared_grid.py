"""Several processes on one grid: each cell is measured once, and none is lost with a process that is killed."""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from dmc.config import build_config
from dmc.results import compare
from dmc.results.compare import divide, run_cells, unfinished
from dmc.results.grid import CompareConfig, plan_grid
from dmc.results.store import Store

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FORK = multiprocessing.get_context("fork")
TASK = """
import os, time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
import torch
from dmc.results.tasks import Sample, SampleResult
from dmc.runtime import GenerationStats

@dataclass(frozen=True)
class Slow:
    log: str
    number: int
    main_metric = "loss"
    higher_is_better = False

    def identity(self):
        return None

    def samples(self, tokenizer, vocab_size):
        return [Sample([1, 2], [3])]

    def evaluate(self, engine, samples):
        with open(self.log, "a") as file:
            file.write(f"{os.getpid()} {self.number}\\n")
        time.sleep(0.05)
        while Path(self.log + ".hold").exists() and str(os.getpid()) in Path(self.log + ".hold").read_text().split():
            time.sleep(0.01)
        if self.number < 0:
            raise KeyError("number")
        stats = GenerationStats.__new__(GenerationStats)
        stats.__dict__.update(tokens_seen=3, slots=torch.ones(1, 1), bytes_allocated=8, bytes_used=8)
        stats.__dict__.update(mean_tokens_seen=2.0, mean_slots=torch.ones(1, 1))
        stats.__dict__.update(mean_bytes_allocated=8.0, mean_bytes_used=8.0)
        stats.__dict__.update(peak_bytes_allocated=8)
        return [SampleResult({"loss": 1.0}, stats)]
"""


class Model:
    """As much of a model as a grid asks for."""

    device = torch.device("cpu")

    def get_input_embeddings(self):
        return torch.nn.Embedding(4, 1)


@pytest.fixture
def grid(folders, tmp_path, monkeypatch):
    (tmp_path / "users_slow.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_slow", raising=False)
    monkeypatch.setattr(compare, "release_memory", lambda: None)  # half a second in a fork of the tests' process
    log = str(tmp_path / "log")
    values = {
        "models": {"base": str(folders.stock)}, "policies": ["full"], "budgets": [],
        "tasks": [{"name": f"t{i}", "_target_": "users_slow.Slow", "log": log, "number": i} for i in range(8)],
        "output": str(tmp_path / "out"),
    }  # fmt: skip
    config = build_config(CompareConfig, values)
    return config, plan_grid(config, CONFIGS)


def work(config, grid):
    store = Store(Path(config.output) / "cells.jsonl")
    cells = unfinished(grid.cells, store.rows())
    run_cells(cells, grid, config, store, lambda model: (Model(), None), lambda *_, **__: None)


def lines(path):
    return [[int(each) for each in line.split()] for line in path.read_text().splitlines()] if path.exists() else []


def written(config):
    path = Path(config.output) / "cells.jsonl"
    return Counter(json.loads(line)["key"] for line in path.read_text().splitlines() if line)


def test_four_processes_divide_a_grid(grid, tmp_path):
    config, planned = grid
    workers = [FORK.Process(target=work, args=grid) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert written(config) == dict.fromkeys([cell.key for cell in planned.cells], 1)
    began = lines(tmp_path / "log")
    assert sorted(number for _, number in began) == list(range(8))
    assert len({pid for pid, _ in began}) > 1
    assert not list((tmp_path / "out" / "claims").iterdir())


def test_the_cells_of_two_killed_processes_of_four_are_measured_by_the_others(grid, tmp_path):
    config, planned = grid
    doomed, others = ([FORK.Process(target=work, args=grid) for _ in range(2)] for _ in range(2))
    (tmp_path / "log.hold").write_text("")
    for worker in doomed:
        worker.start()
        (tmp_path / "log.hold").write_text(" ".join(str(each.pid) for each in doomed if each.pid))
    while {pid for pid, _ in lines(tmp_path / "log")} != {worker.pid for worker in doomed}:
        time.sleep(0.01)
    time.sleep(0.2)  # each holds one cell by now
    for worker in others:
        worker.start()
    while len({number for _, number in lines(tmp_path / "log")}) < 8:  # all others are measured meanwhile
        time.sleep(0.01)
    assert all(worker.is_alive() for worker in others)
    for worker in doomed:
        os.kill(worker.pid, signal.SIGKILL)
        worker.join(20)
    for worker in others:
        worker.join(120)
    assert [worker.exitcode for worker in (*doomed, *others)] == [-signal.SIGKILL] * 2 + [0, 0]
    assert written(config) == dict.fromkeys([cell.key for cell in planned.cells], 1)
    began = Counter(number for _, number in lines(tmp_path / "log"))
    assert sorted(began) == list(range(8)) and sorted(began.values())[-2:] == [2, 2]


def test_what_another_process_has_finished_or_tried_since_the_start_is_left_alone(grid):
    config, planned = grid
    store = Store(Path(config.output) / "cells.jsonl")
    rows = [cell.identity() | {"status": "failed", "error": "an earlier start's"} for cell in planned.cells[:4]]
    for row in rows[:2]:
        store.append(row)
    given = []
    for cell in divide(planned.cells[:4], store):
        given.append(cell)
        if (
            len(given) == 1
        ):  # another process fails at the second and the third meanwhile, as at the last start or first
            for row in rows[1:3]:
                store.append(row | {"error": "the other's"})
        store.append(cell.identity() | {"status": "failed", "error": "mine"})
    assert given == [planned.cells[0], planned.cells[3]]
    assert list(divide(planned.cells[:4], store)) == planned.cells[:4]  # once at every start


def test_a_claim_is_given_back_when_the_work_ends_early(grid, tmp_path):
    config, planned = grid
    store = Store(tmp_path / "out" / "cells.jsonl")

    def stop(model):
        assert len(list((tmp_path / "out" / "claims").iterdir())) == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_cells(planned.cells, planned, config, store, stop)
    assert not list((tmp_path / "out" / "claims").iterdir())
    assert store.rows() == []
