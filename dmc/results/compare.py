"""Run the grid model x policy x budget x task, one row for each cell; finished cells are not run again.

Processes that share a folder divide the cells by claims (`dmc.claims`): each is measured once, and the cell of a killed
process is taken over.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dmc.budget import Budget, achieved_ratio
from dmc.claims import ClaimedError, claim
from dmc.provenance import provenance
from dmc.results.equal_bytes import at_bytes, share_of
from dmc.results.grid import FORMAT, Cell, CompareConfig, ComparedModel, Grid, model_settings, plan_grid
from dmc.results.lm_eval_tasks import LMEvalTask
from dmc.results.measurement import DONE, FAILED, NOT_FINITE, Row, digest
from dmc.results.store import FINISHED, Store
from dmc.results.tables import CSV, MEASUREMENTS, TABLE, write_tables
from dmc.results.tasks import Sample, SampleResult, Task, by_coordinates, split_of_text
from dmc.results.tasks.base import spread
from dmc.runtime import Engine, GenerationStats

logger = logging.getLogger(__name__)
CLAIMS = "claims"
"""Folder beside the rows, with a file for each cell that is being run."""
PAUSE = 1.0
"""Seconds between two checks of cells that other processes run."""
SKETCH_RUNS = 4
"""Runs of neighboring samples in a sketch."""
Load = Callable[[ComparedModel], tuple[Any, Any]]
"""Loads a model and its tokenizer (None if it has none)."""


@dataclass
class LoadedModel:
    """A loaded model and the samples that its cells share."""

    model: Any
    tokenizer: Any
    samples: dict[str, list[Sample]]

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
    only_own: bool = False,
) -> str:
    """Measure the unfinished cells of a grid, and write the tables of its folder; a restart continues.

    Args:
        config: the grid.
        configs: folder of policies, tasks and selections.
        load: returns a model and its tokenizer, called with path, dtype and revision.
        metrics: metrics with tables; None: each task's main one.
        only_own: whether the tables leave out rows of other grids in the folder.
    Returns:
        The tables, and the names of the written files.
    Raises:
        ValueError, FileNotFoundError, ImportError: see `plan_grid`; nothing has been written.
        ArithmeticError: cells failed, or have figures that are not finite; the tables are written and printed.
    """
    grid, folder = plan_grid(config, configs), Path(config.output)
    store = Store(folder / "cells.jsonl")
    cells = unfinished(grid.cells, store.rows())
    print(f"{len(grid.cells)} cells, {len(grid.cells) - len(cells)} finished before: {store.path}", file=sys.stderr)
    run_cells(cells, grid, config, store, lambda model: load(model.path, model.dtype, model.revision))
    keys = {cell.key for cell in grid.cells} if only_own else None
    table = write_tables(store, folder, config.reference, metrics=metrics, keys=keys)
    files = ", ".join(str(folder / name) for name in (TABLE, CSV, MEASUREMENTS))
    table = f"\n{table}\n\n{store.path}, {files}"
    if failed := failed_cells(grid.cells, store.rows()):
        print(table)
        raise ArithmeticError(failed)  # the other jobs of a sweep go on
    return table


def unfinished(cells: Sequence[Cell], rows: list[Row]) -> list[Cell]:
    """List the cells that have no row or a failed one."""
    finished = {row["key"] for row in rows if row["status"] in FINISHED}
    return [cell for cell in cells if cell.key not in finished]


def run_cells(
    cells: Sequence[Cell],
    grid: Grid,
    config: CompareConfig,
    store: Store,
    load: Load,
    make_engine: Callable[..., Engine] = Engine,
) -> list[Row]:
    """Measure cells and store a row as soon as each is finished; a cell that fails is stored as failed.

    Args:
        cells: cells of the grid, grouped by model, so that every model is loaded once.
        grid: models and tasks.
        config: engine settings, seed.
        store: receives the rows.
        load: returns a model, on its device, and its tokenizer.
        make_engine: called as `Engine`.
    Returns:
        The rows.
    """
    rows = []
    source = provenance()
    with tqdm(total=len(cells), unit="cell", smoothing=0) as bar, closing(divide(cells, store)) as own:  # in a log too
        subject = models_of(grid, load)
        for cell in own:
            bar.set_description(cell.title)
            row = describe(cell, grid, config) | {"device": "", "provenance": source}
            try:
                row["device"] = device_name(subject(cell.model).model)
                row |= checked(measure(cell, grid, config, subject(cell.model), make_engine, _given(cell, store)))
            except Exception as error:  # of this cell's model, policy or task; others may succeed
                row |= failure(error)
                bar.write(f"{cell.title}: {row['error']}", file=sys.stderr)
            store.append(row)
            rows.append(row)
            bar.update()
            release_memory()  # free the cell's cache before the next
    return rows


def divide(cells: Sequence[Cell], store: Store) -> Generator[Cell, None, None]:
    """Yield the cells that no other process runs; each is claimed until the next is requested.

    Cells of other processes come last: they are taken over if their process dies, and skipped once it writes their row,
    even of a failure, which the next start repeats.

    Args:
        cells: the cells to run.
        store: store with the rows of finished cells; the claims are beside it.
    Raises:
        OSError: a claim cannot be written.
    """
    if not cells:
        return
    folder = store.path.parent / CLAIMS
    folder.mkdir(exist_ok=True)
    before = {row["key"]: row for row in store.rows()}

    def is_tried(key: str) -> bool:
        row = next((row for row in store.rows() if row["key"] == key), None)
        return row is not None and (row["status"] in FINISHED or row != before.get(key))

    waiting, told, last = list(cells), False, ""
    while waiting:
        held = []
        for cell in waiting:
            if cell.same_bytes_as is not None and not is_tried(cell.same_bytes_as):
                held.append(cell)
                continue
            try:
                with claim(folder / cell.key):
                    if not is_tried(cell.key):
                        yield cell
            except ClaimedError as error:
                held.append(cell)
                last = str(error)
        if len(held) == len(waiting):
            if not told:
                logger.warning("waiting for cells that other processes run (%d): %s", len(held), last)
            told = True
            time.sleep(PAUSE)
        waiting = held


def models_of(grid: Grid, load: Load) -> Callable[[str], LoadedModel]:
    """Return a function from a model's name to the loaded model; it keeps only the last one.

    A model that cannot be loaded is tried once, and raises the same error every time.
    """
    known: dict[str, LoadedModel | Exception] = {}

    def get(name: str) -> LoadedModel:
        if name not in known:
            for other in [other for other, each in known.items() if isinstance(each, LoadedModel)]:
                del known[other]
            release_memory()
            try:
                known[name] = LoadedModel(*load(grid.models[name]), samples={})
            except Exception as error:
                known[name] = error
        found = known[name]
        if isinstance(found, Exception):
            raise found
        return found

    return get


def failure(error: Exception) -> Row:
    """Return a row with the error in one line and its place; memory held by its frames is released."""
    text = " ".join(str(error).split())
    where = traceback.format_exception(error, limit=-8)
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__
    return {
        "status": FAILED,
        "error": f"{type(error).__name__}: {text}" if text else type(error).__name__,
        "error_type": type(error).__name__,
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


def failed_cells(cells: Sequence[Cell], rows: list[Row]) -> str:
    """Return a message about the cells without finite metrics; empty if there are none."""
    ends = {row["key"]: row["status"] for row in rows}
    failed, wrong = (sum(ends.get(cell.key) == end for cell in cells) for end in (FAILED, NOT_FINITE))
    told = [f"{failed} of {len(cells)} cells failed; start it again to try them again"] if failed else []
    told += [f"{wrong} of {len(cells)} cells have figures that are not finite"] if wrong else []
    return "; ".join(told)


def describe(cell: Cell, grid: Grid, config: CompareConfig) -> Row:
    """Return the fields of a row that identify its cell and settings."""
    task = grid.tasks[cell.task]
    shared = cell.identity() | {
        "reference": config.reference or next((each.model for each in grid.cells if not each.learned), None),
        "settings": {
            "model": model_settings(grid.models[cell.model]),
            "policy": cell.method.options,
            "task": grid.task_settings[cell.task],
            "engine": asdict(config.engine),
            "seed": config.seed,
            "format": FORMAT,
        },
    }
    if isinstance(task, LMEvalTask):
        ends = cell.task.removeprefix(task.name)  # ":hidden" where both questions are asked
        names = {"benchmark": task.benchmark.name + ends, "members": [each + ends for each in task.benchmark.tasks]}
        names["question"] = task.settings.question
        shared["settings"] |= {"lm_eval": asdict(task.settings) | {"save_samples": None}}
        return shared | names
    return shared | {
        "main_metric": task.main_metric,
        "higher_is_better": task.higher_is_better,
        "split": split_of_text(task),
        "question": getattr(task, "question", None),
    }


def _given(cell: Cell, store: Store) -> Row | None:
    """Find the row whose bytes are a cell's budget; None: the budget is not in bytes."""
    row = next((row for row in store.rows() if row["key"] == cell.same_bytes_as), None)
    if cell.same_bytes_as is not None and (row is None or row["status"] != DONE):
        raise ArithmeticError(f"{cell.method.asked}: the model whose bytes it shall hold has no results")
    return row


def measure(
    cell: Cell,
    grid: Grid,
    config: CompareConfig,
    subject: LoadedModel,
    make_engine: Callable[..., Engine],
    given: Row | None = None,
) -> Row:
    """Measure quality and memory of one cell.

    Args:
        cell: cell of the grid.
        grid: models and tasks.
        config: engine settings, seed.
        subject: the cell's model.
        make_engine: called as `Engine`.
        given: row whose bytes, or a share of them, are the cell's budget; None: the budget is not in bytes.
    Raises:
        ValueError, NotImplementedError: the engine, the policy or the task refuses the model or a setting.
    """

    def measure_at(ratio: float | None, is_sketch: bool = False) -> Row:
        torch.manual_seed(config.seed)
        policy = cell.method.build(ratio)
        engine = make_engine(subject.model, subject.tokenizer, policy=policy, **asdict(config.engine))
        return measure_engine(engine, cell, grid, config, subject, is_sketch)

    if given is None:
        return measure_at(None)
    share = share_of(cell.method.bytes_of or "") or 1.0
    wanted = share * given["mean_bytes_allocated_per_token"]
    has_few = isinstance(grid.tasks[cell.task], LMEvalTask) or given["samples"] <= config.engine.max_batch_size
    of_few = None if has_few else partial(measure_at, is_sketch=True)
    row = at_bytes(measure_at, wanted, given["mean_achieved_ratio"] / share, of_few)
    return row | {"requested_bytes_per_token": wanted}


def measure_engine(
    engine: Engine, cell: Cell, grid: Grid, config: CompareConfig, subject: LoadedModel, is_sketch: bool = False
) -> Row:
    """Measure a cell with its engine; a sketch takes a batch of samples from all over the task."""
    task, size = grid.tasks[cell.task], config.engine.max_batch_size
    if isinstance(task, LMEvalTask):
        folder = Path(config.output) / "samples" / cell.key
        row, stats = task.run(engine, grid.models[cell.model].path, size, config.seed, folder)
        if (of := row.pop("samples_of", None)) is not None:
            row["samples_key"] = digest(of)
        return {"status": DONE, **row, **memory_of(stats, cell.method.budget)}
    samples = subject.samples_of(cell.task, task)
    if is_sketch:  # neighbors often share a context
        run = max(1, size // SKETCH_RUNS)
        starts = [run * each for each in spread(SKETCH_RUNS, len(samples) // run)]
        samples = [each for start in starts for each in samples[start : start + run]]
    results: list[SampleResult] = []
    for begin in tqdm(range(0, len(samples), size), cell.title, leave=False, unit="batch", disable=None):
        results += task.evaluate(engine, samples[begin : begin + size])
    values = {name: [each.metrics[name] for each in results] for name in results[0].metrics}
    contexts = [[number] if each.context is None else each.context for number, each in enumerate(samples)]
    row = {
        "status": DONE,
        "metrics": {name: statistics.fmean(each) for name, each in values.items()},
        "sample_values": values.pop(task.main_metric, []),
        "samples_by_metric": values,
        "contexts": contexts if any(each.context is not None for each in samples) else [],
        "samples": len(results),
        "samples_key": digest([[each.prompt, each.after, each.continuation] for each in samples]),
        **by_coordinates(results),
        **memory_of([each.stats for each in results], cell.method.budget),
    }
    return row


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
        asked = [_allowed(each, budget.tokens) for each in stats]
        requested = {"requested_ratio": sum(each.mean_tokens_seen for each in stats) / sum(asked)}
    tokens, slots = sum(each.tokens_seen for each in stats), torch.stack([each.slots for each in stats]).sum(0)
    mean_tokens = sum(each.mean_tokens_seen for each in stats)
    mean_slots = sum(float(each.mean_slots.sum()) for each in stats)
    peak = max(stats, key=lambda each: each.bytes_allocated)
    return requested | {
        "achieved_ratio": achieved_ratio(tokens, layers, kv_heads, int(slots.sum())),
        "head_ratios": [[round(tokens / held, 3) for held in layer] for layer in slots.tolist()],
        "peak_tokens": peak.tokens_seen,
        "bytes_allocated": peak.bytes_allocated,
        "bytes_used": peak.bytes_used,
        "bytes_allocated_per_token": sum(each.bytes_allocated for each in stats) / tokens,
        "bytes_used_per_token": sum(each.bytes_used for each in stats) / tokens,
        "mean_tokens": mean_tokens / len(stats),
        "mean_achieved_ratio": mean_tokens * layers * kv_heads / max(mean_slots, 1e-9),
        "mean_bytes_allocated_per_token": sum(each.mean_bytes_allocated for each in stats) / mean_tokens,
        "mean_bytes_used_per_token": sum(each.mean_bytes_used for each in stats) / mean_tokens,
        "peak_bytes_allocated": max(each.peak_bytes_allocated for each in stats),
    }


def _allowed(stats: GenerationStats, tokens: int) -> float:
    """Average a fixed budget's entries over the predicted positions, which end at the last token seen."""
    last = stats.tokens_seen
    seen = range(round(2 * stats.mean_tokens_seen) - last, last + 1)
    return statistics.fmean(min(tokens, each) for each in seen)


def device_name(model: Any) -> str:
    """Return the name of a model's device."""
    return torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else str(model.device)


def release_memory() -> None:
    """Free unused memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
