"""Run the grid model x policy x budget x task, one row for each cell; finished cells are not run again.

Processes that share a folder divide the cells by locks: each is measured once, and the cell of a killed process, whose
lock falls with it, is measured by another.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from tqdm import tqdm

from dmc.budget import Budget, achieved_ratio
from dmc.results.equal_bytes import at_bytes, share_of
from dmc.results.grid import Cell, CompareConfig, plan_grid
from dmc.results.measurement import DONE, FAILED, NOT_FINITE, Row
from dmc.results.models import ComparedModel, PlannedModel
from dmc.results.provenance import provenance
from dmc.results.store import FINISHED, Store, check_settings, refuse_other_settings
from dmc.results.tables import CSV, MEASUREMENTS, TABLE, write_tables
from dmc.results.tasks import Conditions, Sample, Task
from dmc.results.tasks.base import by_prompt, spread
from dmc.runtime import Engine, GenerationStats

logger = logging.getLogger(__name__)
LOCKS = ".locks"
"""Folder beside the rows, with the lock of each cell."""
PAUSE = 1.0
"""Seconds between two checks of cells that other processes run."""
SKETCH = 4
"""Maximum number of contexts in a sketch, which are spread over a task."""
Load = Callable[[ComparedModel], tuple[Any, Any]]
"""Loads a model and its tokenizer (None if it has none)."""


@dataclass
class LoadedModel:
    """A loaded model and the samples that its cells share."""

    model: Any
    tokenizer: Any
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def samples_of(self, name: str, task: Task) -> list[Sample]:
        """Make a task's samples, once."""
        if name not in self.samples:
            vocab_size = self.model.get_input_embeddings().num_embeddings
            self.samples[name] = task.samples(self.tokenizer, vocab_size)
        return self.samples[name]


def compare(
    config: CompareConfig,
    configs: Path,
    load: Callable[..., tuple[Any, Any]],
    *,
    metrics: Sequence[str] | None = None,
    only_this_grid: bool = False,
) -> str:
    """Measure the unfinished cells of a grid, and write the tables of its folder; a restart continues.

    Args:
        config: the grid.
        configs: folder of policies, tasks and selections.
        load: returns a model and its tokenizer, called with path, dtype and revision.
        metrics: metrics with tables; None: each task's main one.
        only_this_grid: whether the tables leave out rows of other grids in the folder.
    Returns:
        The tables, and the names of the written files.
    Raises:
        ValueError, FileNotFoundError, ImportError: see `plan_grid`; nothing has been written.
        ArithmeticError: cells failed, or have metrics that are not finite; the tables are written and printed.
    """
    planned, folder = plan_grid(config, configs), Path(config.output)
    store = Store(folder / "cells.jsonl")
    run_cells(planned, store, lambda model: load(model.path, model.dtype, model.revision))
    keys = {cell.key for cell in planned}
    table = write_tables(store, folder, config.reference, metrics=metrics, keys=keys if only_this_grid else None)
    files = ", ".join(str(folder / name) for name in (TABLE, CSV, MEASUREMENTS))
    table = f"\n{table}\n\n{store.path}, {files}"
    if failed := failed_cells([row for row in store.rows() if row["key"] in keys]):
        print(table)
        raise ArithmeticError(failed)  # the other jobs of a sweep go on
    return table


def run_cells(cells: Sequence[Cell], store: Store, load: Load, make_engine: Callable[..., Engine] = Engine) -> None:
    """Measure cells and store a row as soon as each is finished; a cell that fails is stored as failed.

    Args:
        cells: cells of the grid, grouped by model, so that every model is loaded once; finished ones are left out,
            unless their configuration says `overwrite`.
        store: receives the rows.
        load: returns a model, on its device, and its tokenizer.
        make_engine: called as `Engine`.
    Raises:
        ValueError: a finished row of the store has the key of a cell, and other settings; nothing is measured.
    """
    refuse_other_settings([cell.row for cell in cells if not cell.config.overwrite], store)
    finished = {row["key"] for row in store.rows() if row["status"] in FINISHED}
    remaining = [cell for cell in cells if cell.config.overwrite or cell.key not in finished]
    reused = len(cells) - len(remaining)
    print(f"{len(cells)} cells, {reused} finished before: {store.path}", file=sys.stderr)
    source, loaded = provenance(), models_of(load)
    with tqdm(total=len(remaining), unit="cell", smoothing=0) as bar, closing(divide(remaining, store)) as cells_here:
        for cell in cells_here:
            bar.set_description(cell.title)
            row = cell.row | {"device": "", "provenance": source}
            began = time.perf_counter(), time.process_time()
            with folder_of_tries(cell) as tries:
                try:
                    subject = loaded(cell.model)
                    row["device"] = device_name(subject.model)
                    given = None if cell.same_bytes_as is None else store.row(cell.same_bytes_as.key)
                    answers = None if cell.answers_of is None else store.row(cell.answers_of.key)
                    row |= checked(measure(cell, subject, make_engine, tries, given, answers))
                except Exception as error:  # of this cell's model, policy or task; others may succeed
                    row |= failure(error)
                    bar.write(f"{cell.title}: {row['error']}", file=sys.stderr)
                row |= time_since(*began) | {"time": datetime.now(timezone.utc).isoformat()}
                put(row, cell, store, tries)
            bar.update()
            release_memory()  # free the cell's cache before the next


@contextmanager
def folder_of_tries(cell: Cell) -> Iterator[Path]:
    """Yield a folder, not made yet, for what a cell saves at each ratio that it tries; it is removed at the end."""
    folder = Path(cell.config.output) / "samples" / f"{cell.file_name}.tries"
    shutil.rmtree(folder, ignore_errors=True)  # of a killed process
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put(row: Row, cell: Cell, store: Store, tries: Path) -> None:
    """Store a cell's row, and keep what was saved at its ratio; a kill may leave a row without it, none with another's.

    Raises:
        OSError: the row could not be written.
    """
    saved, chosen = tries.with_name(cell.file_name), tries / _name_of(cell, row["requested_ratio"])
    is_finished = row["status"] in FINISHED  # else the row before stays in the tables, see `Store`
    if is_finished and saved.is_dir():
        tries.mkdir(exist_ok=True)
        saved.rename(tries / "before")
    store.append(row)
    if is_finished and chosen.is_dir():
        chosen.rename(saved)


def _name_of(cell: Cell, ratio: float | None) -> str:
    """Name the folder of a try."""
    return "only" if cell.same_bytes_as is None else repr(ratio)


def time_since(seconds: float, cpu_seconds: float) -> dict[str, float]:
    """Return the seconds since the clock stood there, and those that all threads of the process have computed since."""
    return {"seconds": time.perf_counter() - seconds, "cpu_seconds": time.process_time() - cpu_seconds}


def divide(cells: Sequence[Cell], store: Store) -> Generator[Cell, None, None]:
    """Yield the cells that no other process runs; each is locked until the next is requested.

    Cells of other processes come last: one whose process dies is yielded, one with a new row is skipped, even if it has
    failed, for the next start tries that again. What was finished before the start is skipped too, unless the cell's
    configuration says `overwrite`.

    Args:
        cells: the cells to run.
        store: store with the rows of finished cells; the locks are beside it.
    Raises:
        ValueError: another process has measured a cell with other settings meanwhile.
    """
    folder = store.path.parent / LOCKS
    before = {row["key"]: row for row in store.rows()}

    def is_measured(cell: Cell) -> bool:
        row = store.row(cell.key)
        if row is None:
            return False
        is_new, is_kept = row != before.get(cell.key), row["status"] in FINISHED and not cell.config.overwrite
        if is_new or is_kept:
            check_settings(cell.row, row, store)
        return is_new or is_kept

    waiting, is_reported = list(cells), False
    while waiting:
        folder.mkdir(exist_ok=True)
        held, locks = list[Cell](), list[str]()
        for cell in waiting:
            if not all(map(is_measured, cell.waits_for)):
                held.append(cell)
                continue
            lock = FileLock(folder / f"{cell.file_name}.lock")
            try:
                with lock.acquire(blocking=False):
                    if not is_measured(cell):
                        yield cell
            except Timeout:
                held.append(cell)
                locks.append(lock.lock_file)
        if len(held) == len(waiting):
            if not is_reported and locks:
                logger.warning(
                    "waiting for %d cells that other processes run; if none runs, and this disk has no locks of its "
                    "own, remove %s", len(held), ", ".join(locks),
                )  # fmt: skip
            is_reported = True
            time.sleep(PAUSE)
        waiting = held


def models_of(load: Load) -> Callable[[PlannedModel], LoadedModel]:
    """Return a function from a model of the grid to the loaded one; it keeps only the last.

    A model that cannot be loaded, or was replaced since the start, is tried once, and raises the same error for each of
    its cells.
    """
    last: dict[str, LoadedModel | Exception] = {}

    def get(model: PlannedModel) -> LoadedModel:
        if model.name not in last:
            last.clear()
            release_memory()
            try:
                last[model.name] = LoadedModel(*load(model.settings))
                model.check_unchanged()
            except Exception as error:
                last[model.name] = error
        found = last[model.name]
        if isinstance(found, Exception):
            raise found
        return found

    return get


def failure(error: Exception) -> Row:
    """Return a row with the error in one line and its place; memory held by its frames is released."""
    text = " ".join(str(error).split())
    where = traceback.format_exception(error, limit=-8)
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    return {
        "status": FAILED,
        "error": f"{type(error).__name__}: {text}" if text else type(error).__name__,
        "traceback": "".join(where)[-4000:],
    }


def checked(row: Row) -> Row:
    """Mark a row with metrics that are infinite or NaN, which no statistic can use.

    Raises:
        TypeError: a user's task has returned values that JSON cannot hold; here only its cell fails.
    """
    json.dumps(row)
    wrong = [name for name, value in row["metrics"].items() if isinstance(value, float) and not math.isfinite(value)]
    return row | ({"status": NOT_FINITE, "not_finite": wrong} if wrong else {})


def failed_cells(rows: Sequence[Row]) -> str:
    """Return a message about the cells without finite metrics; empty if there are none."""
    failed, wrong = (sum(row["status"] == status for row in rows) for status in (FAILED, NOT_FINITE))
    message = [f"{failed} of {len(rows)} cells failed; run the same command again to repeat them"] if failed else []
    message += [f"{wrong} of {len(rows)} cells have metrics that are not finite"] if wrong else []
    return "; ".join(message)


def measure(
    cell: Cell,
    subject: LoadedModel,
    make_engine: Callable[..., Engine],
    tries: Path,
    given: Row | None = None,
    answers: Row | None = None,
) -> Row:
    """Measure quality and memory of one cell.

    Args:
        cell: cell of the grid.
        subject: the cell's model.
        make_engine: called as `Engine`.
        tries: folder for what the task saves, in a folder of its own for each try.
        given: row whose bytes, or a share of them, are the budget of a cell with one in bytes.
        answers: row whose answers are the right ones of the task's samples; None: they have their own.
    Raises:
        ArithmeticError: one of these rows has no figures.
        ValueError, NotImplementedError: the engine, the policy or the task refuses the model or a setting.
    """
    config, task = cell.config, cell.task.task

    def measure_at(ratio: float | None, is_sketch: bool = False) -> Row:
        torch.manual_seed(config.seed)
        folder = tries / ("sketch" if is_sketch else _name_of(cell, ratio))
        conditions = Conditions(cell.model.settings.path, config.engine.max_batch_size, config.seed, folder)
        policy = cell.method.build(ratio)
        engine = make_engine(subject.model, subject.tokenizer, policy=policy, **asdict(config.engine))
        samples = subject.samples_of(cell.task.name, task)
        if cell.answers_of is not None:
            samples = _with_answers(samples, answers)
        row, stats = task.measure(engine, _sketch(samples) if is_sketch else samples, conditions)
        unread = {"entries_unread": int(engine.cache.num_unread)}
        return {"status": DONE, **row, **memory_of(stats, cell.method.budget), **unread}

    if cell.same_bytes_as is None:
        return measure_at(None)
    if given is None or given["status"] != DONE:
        raise ArithmeticError(f"{cell.method.budget_name}: the cell that its bytes are taken from has no results")
    share = share_of(cell.method.bytes_of or "") or 1.0
    wanted = share * given["mean_bytes_allocated_per_token"]
    first, reached = given["mean_achieved_ratio"] / share, None
    if len(by_prompt(subject.samples_of(cell.task.name, task))) > SKETCH:  # a sketch saves measurements of all samples
        few = at_bytes(partial(measure_at, is_sketch=True), wanted, first)
        first, reached = few["requested_ratio"], few["mean_bytes_allocated_per_token"]
    return at_bytes(measure_at, wanted, first, reached) | {"requested_bytes_per_token": wanted}


def _with_answers(samples: Sequence[Sample], row: Row | None) -> list[Sample]:
    """Make the answers of a full cache's row the right ones.

    Raises:
        ArithmeticError: the row has none.
    """
    if row is None or row["status"] != DONE:
        raise ArithmeticError("the cell of the full cache, whose answers are the right ones, has no results")
    return [replace(one, continuation=answer) for one, answer in zip(samples, row["answers"], strict=True)]


def _sketch(samples: Sequence[Sample]) -> list[Sample]:
    """Choose contexts from all over a task, with all questions about them, which cost little."""
    contexts = by_prompt(samples)
    return [samples[index] for place in spread(SKETCH, len(contexts)) for index in contexts[place]]


def memory_of(stats: list[GenerationStats], budget: Budget | None = None) -> dict[str, Any]:
    """Summarize the memory of samples: ratios are total tokens over total entries, bytes per token likewise.

    Means are over the predicted positions, all other values are at the last step of each sample.

    Args:
        stats: statistics of each sample.
        budget: budget of the policy; a fixed number of entries is converted to a ratio over the same positions.
    """
    layers, kv_heads = stats[0].slots.shape
    requested = {}
    if budget is not None and budget.tokens is not None:
        asked = [_allowed(stat, budget.tokens) for stat in stats]
        requested = {"requested_ratio": sum(stat.mean_tokens_seen for stat in stats) / sum(asked)}
    tokens, slots = sum(stat.tokens_seen for stat in stats), torch.stack([stat.slots for stat in stats]).sum(0)
    mean_tokens = sum(stat.mean_tokens_seen for stat in stats)
    mean_slots = sum(float(stat.mean_slots.sum()) for stat in stats)
    return requested | {
        "entries_seen": tokens * layers * kv_heads,
        "entries_held": int(slots.sum()),
        "achieved_ratio": achieved_ratio(tokens, layers, kv_heads, int(slots.sum())),
        "head_ratios": [[round(tokens / held, 3) for held in layer] for layer in slots.tolist()],
        "bytes_allocated_per_token": sum(stat.bytes_allocated for stat in stats) / tokens,
        "mean_tokens": mean_tokens / len(stats),
        "mean_achieved_ratio": mean_tokens * layers * kv_heads / max(mean_slots, 1e-9),
        "mean_bytes_allocated_per_token": sum(stat.mean_bytes_allocated for stat in stats) / mean_tokens,
        "peak_bytes_allocated": max(stat.peak_bytes_allocated for stat in stats),
    }


def _allowed(stats: GenerationStats, tokens: int) -> float:
    """Average a fixed budget's entries over the predicted positions, which end at the last token seen."""
    last = stats.tokens_seen
    seen = range(round(2 * stats.mean_tokens_seen) - last, last + 1)
    return statistics.fmean(min(tokens, tokens_seen) for tokens_seen in seen)


def device_name(model: Any) -> str:
    """Return the name of a model's device."""
    return torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else str(model.device)


def release_memory() -> None:
    """Free unused memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
