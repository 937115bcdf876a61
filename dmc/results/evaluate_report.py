"""Rows of an evaluation as a table, a CSV file and a JSON file."""

from __future__ import annotations

import csv
import io
import json
import math
import operator
import statistics
from pathlib import Path
from typing import Any

from dmc.results.compare_report import CSV, TABLE, replace_file, requested, untold
from dmc.results.row_names import told_apart
from dmc.results.store import DONE, Row

JSON = "results.json"
COLUMNS = (
    *("model", "policy", "budget", "benchmark", "tasks", "metric", "value", "error", "higher_is_better"),
    *("requested_ratio", "mean_achieved_ratio", "mean_bytes_allocated_per_token", "peak_bytes_allocated"),
    *("achieved_ratio", "bytes_allocated_per_token", "bytes_allocated", "samples", "num_fewshot"),
    *("prompts_cut", "device", "command", "git_commit", "keys"),
)


def write_evaluation_report(rows: list[Row], folder: Path) -> str:
    """Write `table.md`, `results.csv` and `results.json`; each is replaced whole.

    Args:
        rows: of one or several runs, in the order in which they were written.
        folder: where to.
    Returns:
        The table.
    """
    rows = told_apart(rows)
    done = [row for row in rows if row["status"] == DONE]
    figures = benchmark_figures(done)
    notes = untold(rows) + [
        f"{row['method']}, {row['task']}: {row['prompts_cut']} prompts were longer than the model's positions and lost "
        "their beginning"
        for row in done
        if row["prompts_cut"]
    ]
    table = "\n\n".join([*([format_table(figures)] if figures else []), *notes])
    replace_file(folder / TABLE, f"{table}\n".encode())
    replace_file(folder / CSV, format_csv(figures).encode())
    replace_file(folder / JSON, json.dumps(figures, indent=1).encode())
    return table


def benchmark_figures(rows: list[Row]) -> list[dict[str, Any]]:
    """Put the tasks of each benchmark together: their unweighted mean, where all of them are finished."""
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        place = (row["model"], row["policy"], row["budget"], row["benchmark"], *row["members"])
        groups.setdefault(place, {})[row["task"]] = row
    return [
        _figure([found[task] for task in place[4:]]) for place, found in groups.items() if len(found) == len(place[4:])
    ]


def _figure(rows: list[Row]) -> dict[str, Any]:
    first, names = rows[0], {row["main_metric"] for row in rows}
    errors = [row["errors"].get(row["main_metric"]) for row in rows]
    weights = [row["mean_tokens"] * row["samples"] for row in rows]
    ratios = ("requested_ratio", "achieved_ratio", "mean_achieved_ratio")
    sizes = ("bytes_allocated_per_token", "mean_bytes_allocated_per_token")
    return {name: first[name] for name in ("method", "model", "policy", "budget", "benchmark", "device")} | {
        "tasks": {row["task"]: row["metrics"][row["main_metric"]] for row in rows},
        "metric": names.pop() if len(names) == 1 else "mean",
        "value": statistics.fmean(row["metrics"][row["main_metric"]] for row in rows),
        "error": None if None in errors else math.hypot(*errors) / len(errors),
        "higher_is_better": first["higher_is_better"],
        **{name: statistics.harmonic_mean([row[name] for row in rows], weights) for name in ratios},
        **{name: sum(map(operator.mul, weights, (row[name] for row in rows))) / sum(weights) for name in sizes},
        **{name: max(row[name] for row in rows) for name in ("bytes_allocated", "peak_bytes_allocated")},
        "samples": sum(row["samples"] for row in rows),
        "num_fewshot": sorted({shots for row in rows for shots in row["num_fewshot"]}),
        "prompts_cut": sum(row["prompts_cut"] for row in rows),
        "command": first["provenance"]["command"],
        "git_commit": first["provenance"]["git_commit"],
        "versions": first["provenance"]["versions"],
        "settings": first["settings"],
        "keys": [row["key"] for row in rows],
    }


def format_table(figures: list[dict[str, Any]]) -> str:
    """Write one line per method and one column per benchmark as Markdown."""
    columns = list(dict.fromkeys((each["benchmark"], each["metric"]) for each in figures))
    lines: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for each in figures:
        lines.setdefault((each["method"], each["budget"]), []).append(each)
    headers = [f"{name} ({metric})" for name, metric in columns]
    text = [f"| {' | '.join(['method', 'requested', 'achieved CR', *headers, 'cache bytes/token'])} |"]
    text.append("|---" * (4 + len(columns)) + "|")
    for (method, _), found in lines.items():
        by_column = {(each["benchmark"], each["metric"]): each for each in found}
        ratios = sorted({f"{each['mean_achieved_ratio']:.2f}" for each in found}, key=float)
        most = max(each["mean_bytes_allocated_per_token"] for each in found)
        cells = [method, requested(found[0]), " to ".join(dict.fromkeys((ratios[0], ratios[-1])))]
        cells += [_value(by_column.get(column)) for column in columns]
        text.append(f"| {' | '.join(cells)} | {most:,.0f} |")
    return "\n".join(text)


def format_csv(figures: list[dict[str, Any]]) -> str:
    """Write all figures, one line per method and benchmark."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for each in figures:
        texts = {name: json.dumps(each[name]) for name in ("tasks", "num_fewshot", "keys")}
        writer.writerow([(each | texts)[name] for name in COLUMNS])
    return file.getvalue()


def _value(figure: dict[str, Any] | None) -> str:
    if figure is None:
        return "-"
    return f"{figure['value']:.4f}" + ("" if figure["error"] is None else f" ± {figure['error']:.4f}")
