"""Rows of a comparison as a table, a CSV file and a picture."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import itertools
import operator
import os
import socket
import statistics
from pathlib import Path
from typing import Any

from dmc.results.paired import paired_error
from dmc.results.quality_plot import plot_quality
from dmc.results.row_names import told_apart
from dmc.results.store import DONE, NOT_FINITE, Row

TABLE, CSV, PLACES, PLOT = "table.md", "results.csv", "results_by_place.csv", "quality_over_bytes.png"
COLUMNS = (
    *("model", "policy", "budget", "task", "main_metric", "quality", "over_full_cache", "over_full_cache_error"),
    *("requested_ratio", "mean_achieved_ratio", "mean_bytes_allocated_per_token", "mean_bytes_used_per_token"),
    *("peak_bytes_allocated", "achieved_ratio", "bytes_allocated_per_token", "bytes_used_per_token"),
    *("bytes_allocated", "bytes_used", "peak_tokens", "prefill_tokens_per_second", "decode_tokens_per_second"),
    *("samples", "split", "question", "device", "key"),
)


def write_report(rows: list[Row], folder: Path, reference: str | None = None) -> str:
    """Write `table.md`, `results.csv`, `results_by_place.csv` and `quality_over_bytes.png`; each is replaced whole.

    Args:
        rows: of one or several runs, in the order in which they were written.
        folder: where to.
        reference: stock model with whose full cache compressed models are compared; None: see `over_full_cache`.
    Returns:
        The table.
    """
    rows = told_apart(rows)
    done = [row | over_full_cache(row, rows, reference) for row in rows if row["status"] == DONE]
    notes = untold(rows)
    devices = sorted({row["device"] for row in done if row.get("decode_tokens_per_second") is not None})
    if len(devices) > 1:
        notes.append(f"speeds were measured on several devices, which do not compare: {', '.join(devices)}")
    table = "\n\n".join([*(format_task(task, done) for task in _tasks(done)), *notes])
    replace_file(folder / TABLE, f"{table}\n".encode())
    replace_file(folder / CSV, format_csv(done).encode())
    replace_file(folder / PLACES, format_places(done).encode())
    if done:
        picture = io.BytesIO()
        plot_quality({task: _ranked(task, done) for task in _tasks(done)}, picture)
        replace_file(folder / PLOT, picture.getvalue())
    return table


def untold(rows: list[Row]) -> list[str]:
    """Say which rows have no place among the figures, and why."""
    notes = []
    for row in rows:
        if row["status"] != DONE:
            where = ", ".join([row["method"], *([] if row["budget"] is None else [requested(row)]), row["task"]])
            left = (
                f"not finite, left out of the figures: {where}" if row["status"] == NOT_FINITE else f"failed: {where}"
            )
            notes.append(f"{left}: {reason(row)}")
    return notes


def reason(row: Row) -> str:
    """Say why a row has no figures: its error, or the metrics that are infinite or no numbers."""
    if row["status"] == NOT_FINITE:
        return ", ".join(f"{name} is {row['metrics'][name]}" for name in row.get("not_finite") or row["metrics"])
    return str(row.get("error", "unknown"))


def over_full_cache(row: Row, rows: list[Row], reference: str | None = None) -> dict[str, Any]:
    """Compare a row with the full cache of its model, or of the reference for a compressed model.

    That is the one given, or the one that the row was measured with; with neither, the only stock model there is.

    Returns:
        The quality, the difference in it and the standard error of that difference, paired sample by sample; None where
        there is no other row of the full cache on the same samples.
    """
    found: dict[str, Any] = {"quality": row["metrics"][row["main_metric"]]}
    model = (reference or row.get("reference")) if row["own_gates"] else row["model"]
    same = [
        other
        for other in rows
        if other["status"] == DONE
        and other["budget"] is None
        and not other["own_gates"]
        and model in (None, other["model"], other.get("named"))
        and all(other[name] == row[name] for name in ("task", "task_key", "samples_key"))
    ]
    names = {other.get("named", other["model"]) for other in same}
    full = same[-1] if len(names) == 1 else None  # the newest of what has that name; of several, none
    if full is None or full["key"] == row["key"]:
        return found | {"over_full_cache": None, "over_full_cache_error": None}
    values, others = row["sample_values"], full["sample_values"]
    difference, error = statistics.fmean(values) - statistics.fmean(others), paired_error([values], [others])
    return found | {"over_full_cache": difference, "over_full_cache_error": error}


def requested(row: Row) -> str:
    """Write the budget; for a model's own gates the ratio that they were trained for."""
    if row["budget"] is not None and row["budget"].startswith("tokens:"):
        return row["budget"].removeprefix("tokens:") + " tokens"
    return f"CR {row['requested_ratio']:g}"


def format_task(task: str, rows: list[Row]) -> str:
    """Write one task's rows as Markdown, within each budget the best first."""
    rows = _ranked(task, rows)
    metric, samples = rows[0]["main_metric"], rows[0]["samples"]
    better = "higher" if rows[0]["higher_is_better"] else "lower"
    split = f" of the {rows[0]['split']} split" if rows[0].get("split") else ""
    question = f", question {rows[0]['question']}" if rows[0].get("question") else ""
    lines = [
        f"### {task}: {metric} of {samples} samples{split} ({better} is better){question}\n",
        f"| method | requested | achieved CR | {metric} | over full cache | cache bytes/token | peak cache bytes "
        "| prefill tokens/s | decode tokens/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['method']} | {requested(row)} | {row['mean_achieved_ratio']:.2f} | {row['quality']:.4f} "
            f"| {_difference(row)} | {row['mean_bytes_allocated_per_token']:,.0f} | {row['peak_bytes_allocated']:,} "
            f"| {_speed(row, 'prefill')} | {_speed(row, 'decode')} |"
        )
    return "\n".join(lines)


def format_csv(rows: list[Row]) -> str:
    """Write all figures, one line per cell; every metric has a column."""
    metrics = sorted({name for row in rows for name in row["metrics"]})
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*COLUMNS, *metrics])
    for task in _tasks(rows):
        for row in _ranked(task, rows):
            writer.writerow([*(row.get(name) for name in COLUMNS), *(row["metrics"].get(name) for name in metrics)])
    return file.getvalue()


def format_places(rows: list[Row]) -> str:
    """Write the figures by length and depth, position, turn or entries: one line per cell, place and metric."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(
        ["model", "policy", "budget", "mean_achieved_ratio", "task", "place", "samples", "metric", "value", "key"]
    )
    for row in rows:
        cell = [row[name] for name in ("model", "policy", "budget", "mean_achieved_ratio", "task")]
        for table in (value for name, value in row.items() if name.startswith("by_")):
            names = list(table)[: list(table).index("samples")]
            for indices in itertools.product(*(range(len(table[name])) for name in names)):
                place = " ".join(f"{name}={table[name][i]}" for name, i in zip(names, indices, strict=True))
                samples = functools.reduce(operator.getitem, indices, table["samples"])
                for metric in list(table)[len(names) + 1 :] if samples else []:
                    value = functools.reduce(operator.getitem, indices, table[metric])
                    writer.writerow([*cell, place, samples, metric, value, row["key"]])
    return file.getvalue()


def _tasks(rows: list[Row]) -> list[str]:
    return sorted({row["task"] for row in rows})


def _ranked(task: str, rows: list[Row]) -> list[Row]:
    """Sort a task's rows: ratios from 1 up, then fixed budgets from large to small; the best first within each."""

    def place(row: Row) -> tuple[bool, float, float]:
        fixed = row["budget"] is not None and row["budget"].startswith("tokens:")
        budget = -float(row["budget"].removeprefix("tokens:")) if fixed else row["requested_ratio"]
        return fixed, budget, -row["quality"] if row["higher_is_better"] else row["quality"]

    return sorted((row for row in rows if row["task"] == task), key=place)


def _difference(row: Row) -> str:
    if row["over_full_cache"] is None:
        return "-"
    error = row["over_full_cache_error"]
    return f"{row['over_full_cache']:+.4f}" + ("" if error is None else f" ± {error:.4f}")


def _speed(row: Row, phase: str) -> str:
    speed = row.get(f"{phase}_tokens_per_second")
    return "-" if speed is None else f"{speed:,.0f}"


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole: jobs of a sweep write the same one.

    Raises:
        OSError: it cannot be written; an earlier one stays.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise type(error)(
            error.errno, f"{error.strerror or error}, the file could not be written", str(path)
        ) from error
