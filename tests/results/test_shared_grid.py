"""Several processes on one grid: each cell is measured once, and none is lost with a process that is killed."""

import errno
import itertools
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from report_rows import CONFIGS

from dmc.results import compare
from dmc.results.compare import divide, run_cells
from dmc.results.grid import plan_grid
from dmc.results.store import Store

FORK = multiprocessing.get_context("fork")
TASK = """
import os, time
from dataclasses import dataclass
from pathlib import Path
import torch
from dmc.results.tasks import Sample, SampleResult, Task
from dmc.runtime import GenerationStats

@dataclass(frozen=True)
class Slow(Task):
    log: str
    number: int
    main_metric = "loss"
    higher_is_better = False

    def samples(self, tokenizer, vocab_size):
        return [Sample([1, 2], [3])]

    def measure(self, engine, samples, conditions):
        if "SAVED" in os.environ:
            conditions.folder.mkdir(parents=True)
            (conditions.folder / "said.jsonl").write_text(os.environ["SAVED"])
        return super().measure(engine, samples, conditions)

    def evaluate(self, engine, samples):
        with open(self.log, "a") as file:
            file.write(f"{os.getpid()} {self.number}\\n")
        time.sleep(3600 if "HELD" in os.environ else 0.05)
        stats = GenerationStats.__new__(GenerationStats)
        stats.__dict__.update(tokens_seen=3, slots=torch.ones(1, 1), bytes_allocated=8, mean_bytes_allocated=8.0)
        stats.__dict__.update(mean_tokens_seen=2.0, mean_slots=torch.ones(1, 1), peak_bytes_allocated=8)
        return [SampleResult({"loss": 1.0}, stats)]
"""


MODEL = SimpleNamespace(device=torch.device("cpu"), get_input_embeddings=lambda: torch.nn.Embedding(4, 1))
"""As much of a model as a grid asks for."""
ENGINE = SimpleNamespace(cache=SimpleNamespace(num_unread=0))
"""As much of an engine: without it a row is that of a failure, which a process that starts later repeats."""


@pytest.fixture
def grid(make_config, tmp_path, monkeypatch):
    (tmp_path / "users_slow.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_slow", raising=False)
    monkeypatch.setattr(compare, "release_memory", lambda: None)  # half a second in a fork of the tests' process
    monkeypatch.setattr(compare, "time_since", lambda *_: {})  # rows of one length
    log = str(tmp_path / "log")
    tasks = [{"name": f"t{i}", "_target_": "users_slow.Slow", "log": log, "number": i} for i in range(8)]
    return plan_grid(make_config(tasks=tasks), CONFIGS)


def store_of(cells):
    return Store(Path(cells[0].config.output) / "cells.jsonl")


def work(cells, loading=lambda: None):
    def load(model):
        loading()
        return MODEL, None

    run_cells(cells, store_of(cells), load, lambda *_, **__: ENGINE)


def hold(cells):
    """Measure a first cell, which does not end."""
    os.environ["HELD"] = ""
    work(cells)


def killed_at(point, cells, torn=None):
    """Measure cells and be killed at a line of code from the writing of the first row on, or when its line is torn."""
    append, passed = Store.append, itertools.count()
    files = {sys.modules[kind.__module__].__file__ for kind in (Store, type(FileLock("")))} | {compare.__file__}

    def trace(frame, event, _):
        if event == "line" and next(passed) == point:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace if frame.f_code.co_filename in files else None

    def traced_append(store, row):
        if torn is not None:  # the kernel writes so many bytes and ends the process at the next
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (torn, torn))
        else:
            sys.settrace(trace)
        append(store, row)

    Store.append = traced_append
    work(cells)
    sys.settrace(None)


def lines(path):
    return [[int(number) for number in line.split()] for line in path.read_text().splitlines()] if path.exists() else []


def written(cells, is_torn=False):
    rows = [json.loads(line) for line in store_of(cells).path.read_text().splitlines()[is_torn:] if line]
    assert {row["status"] for row in rows} == {"done"}
    return Counter(row["key"] for row in rows)


def test_the_cells_of_two_killed_processes_of_four_are_measured_by_the_others(grid, tmp_path):
    doomed, others = ([FORK.Process(target=target, args=(grid,)) for _ in range(2)] for target in (hold, work))
    for worker in doomed:
        worker.start()
    while {pid for pid, _ in lines(tmp_path / "log")} != {worker.pid for worker in doomed}:
        time.sleep(0.01)
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
    assert written(grid) == dict.fromkeys([cell.key for cell in grid], 1)
    began = Counter(number for _, number in lines(tmp_path / "log"))
    assert sorted(began) == list(range(8)) and sorted(began.values()) == [1] * 6 + [2, 2]


@pytest.fixture
def after_a_death(grid, tmp_path):
    """Return a function that lets a process measure the second cell and die, beside one that has begun with the first.

    It returns the exit code, the rows of the second cell, and what the other process is given next.
    """

    def run(*args):
        store = store_of(grid)
        store.path.unlink(missing_ok=True)
        given = divide(grid[:2], store)
        assert next(given) is grid[0]
        worker = FORK.Process(target=killed_at, args=(args[0], grid[1:2], *args[1:]))
        worker.start()
        worker.join(60)
        found = [row for row in store.rows() if row["key"] == grid[1].key]
        with closing(given):
            return worker.exitcode, found, list(given)

    return run


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_row_is_neither_missed_nor_written_twice_wherever_its_process_is_killed(every, grid, after_a_death):
    stages = []
    for point in itertools.count(step=every):
        code, rows, left = after_a_death(point)
        assert left == ([] if rows else grid[1:2])
        stages.append((code, len(rows)))
        if code == 0:
            break
    assert stages == sorted(
        stages, key=lambda stage: (stage[0] == 0, stage[1])
    )  # none before the write, one from it on
    assert {*stages} == {(-signal.SIGKILL, 0), (-signal.SIGKILL, 1), (0, 1)} and len(stages) > 20 // every


def test_a_line_that_is_torn_anywhere_is_measured_again_if_it_is_no_row(grid, after_a_death):
    work(grid[1:2])
    size = store_of(grid).path.stat().st_size
    for torn in (1, size // 2, size - 2, size - 1):  # the last lacks but its newline
        code, rows, left = after_a_death(0, torn)
        assert code == -signal.SIGXFSZ and store_of(grid).path.stat().st_size == torn
        assert (rows != []) == (torn == size - 1) and left == ([] if rows else grid[1:2])
        work(grid[:2])
        assert written(grid, is_torn=not rows) == dict.fromkeys([cell.key for cell in grid[:2]], 1)


def test_what_another_process_has_finished_or_tried_since_the_start_is_left_alone(grid):
    store = store_of(grid)
    rows = [cell.row | {"status": "failed", "error": "an earlier start's"} for cell in grid[:4]]
    for row in rows[:2]:
        store.append(row)
    given = []
    for cell in divide(grid[:4], store):
        given.append(cell)
        if (
            len(given) == 1
        ):  # another process fails at the second and the third meanwhile, as at the last start or first
            for row in rows[1:3]:
                store.append(row | {"error": "the other's"})
        store.append(cell.row | {"status": "failed", "error": "mine"})
    assert given == [grid[0], grid[3]]
    assert list(divide(grid[:4], store)) == grid[:4]  # once at every start


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_row_that_another_process_measures_meanwhile_with_other_settings_is_not_taken_for_ones_own(grid, overwrite):
    store, other = store_of(grid), dict(grid[1].row)
    other["settings"] = {**other["settings"], "engine": {**other["settings"]["engine"], "block_size": 32}}
    cells = [replace(cell, config=replace(cell.config, overwrite=overwrite)) for cell in grid[:3]]
    given = divide(cells, store)
    assert next(given) is cells[0]
    store.append(other | {"status": "failed", "error": "the other's"})
    with pytest.raises(ValueError, match=f"{grid[1].key} with engine.block_size=32, not 16: give .* another output"):
        next(given)


def test_a_budget_in_bytes_is_not_taken_from_a_row_with_other_settings(grid):
    store, cells = store_of(grid), [grid[0], replace(grid[1], same_bytes_as=grid[0])]
    given = divide(cells, store)
    assert next(given) is cells[0]
    settings = {**grid[0].row["settings"], "seed": 9}
    figures = {"metrics": {"loss": 1.0}, "achieved_ratio": 1.0, "bytes_allocated_per_token": 1.0}
    store.append(grid[0].row | {"status": "done", "settings": settings, **figures})
    with pytest.raises(ValueError, match=f"{grid[0].key} with seed=9, not 0"):
        next(given)


def test_with_overwrite_each_cell_is_measured_by_one_of_four_processes(grid, tmp_path):
    work(grid)
    again = [replace(cell, config=replace(cell.config, overwrite=True)) for cell in grid]
    barrier = FORK.Barrier(4)  # each holds its first cell before any is measured
    workers = [FORK.Process(target=work, args=(again, barrier.wait)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert written(grid) == dict.fromkeys([cell.key for cell in grid], 2)
    assert len({pid for pid, _ in lines(tmp_path / "log")}) == 5


def test_a_lock_is_given_back_when_the_work_ends_early(grid):
    store = store_of(grid)

    def stop(model):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_cells(grid, store, stop)
    assert store.rows() == [] and next(divide(grid, store)) == grid[0]


def test_saved_samples_are_those_of_the_row_whatever_stops_a_cell(grid, tmp_path, monkeypatch):
    saved, store = Path(grid[0].config.output) / "samples" / grid[0].file_name, store_of(grid)
    again = [replace(grid[0], config=replace(grid[0].config, overwrite=True))]

    def full_disk(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("SAVED", "first")
    work(grid[:1])
    first = store.rows()
    monkeypatch.setenv("SAVED", "second")
    worker = FORK.Process(target=hold, args=(again,))
    worker.start()
    while len(lines(tmp_path / "log")) < 2:
        time.sleep(0.01)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(20)
    assert store.rows() == first and (saved / "said.jsonl").read_text() == "first"
    monkeypatch.delenv("SAVED")
    work(again)
    assert [*saved.parent.iterdir()] == []

    monkeypatch.setenv("SAVED", "third")
    work(again)
    assert (saved / "said.jsonl").read_text() == "third"
    monkeypatch.setenv("SAVED", "fourth")
    monkeypatch.setattr(Store, "append", full_disk)
    with pytest.raises(OSError, match="No space"):
        work(again)
    assert [*saved.parent.iterdir()] == []
