"""Rows of compare.py and evaluate.py as results and failures."""

from __future__ import annotations

import math
import statistics
from typing import Any

from dmc.results.compare_report import over_full_cache, reason
from dmc.results.evaluate_report import benchmark_figures
from dmc.results.paired import paired_error
from dmc.results.report.findings import Failure, Findings, Result
from dmc.results.report.names import budget_of, short_names
from dmc.results.report.place_rows import add_places
from dmc.results.row_names import told_apart
from dmc.results.store import DONE, NOT_FINITE, Row


def add_cells(rows_by_folder: dict[str, list[Row]], findings: Findings, reference: str | None = None) -> None:
    """Add the row of every cell; the tasks of a benchmark become their mean.

    Args:
        rows_by_folder: in the order in which they were written; all of them, since the same name may stand for other
            settings in another folder.
        findings: to add to.
        reference: stock model with whose full cache compressed models are compared; None: see `over_full_cache`.
    """
    folders = [folder for folder, rows in rows_by_folder.items() for _ in rows]
    rows = told_apart([row for rows in rows_by_folder.values() for row in rows])
    found = {
        folder: [row for each, row in zip(folders, rows, strict=True) if each == folder] for folder in rows_by_folder
    }
    names, taken = short_names(list(found.values())), set(findings.tasks)
    for folder, own in found.items():
        tasks = {str(row.get("benchmark", row["task"])) for row in own}
        renamed = [
            _rename_task(row, f" ({folder})") if row.get("benchmark", row["task"]) in taken else row for row in own
        ]
        _add_folder(renamed, folder, names, findings, reference)
        taken |= tasks


def _rename_task(row: Row, suffix: str) -> Row:
    column = "benchmark" if "benchmark" in row else "task"
    return row | {column: row[column] + suffix}


def _add_folder(rows: list[Row], folder: str, names: dict[str, str], findings: Findings, reference: str | None) -> None:
    sources = [findings.add_source(folder, row["provenance"], row.get("device", "")) for row in rows]
    done = [(row, source) for row, source in zip(rows, sources, strict=True) if row["status"] == DONE]
    findings.results += [
        _compared(row, rows, names, source, reference) for row, source in done if "benchmark" not in row
    ]
    findings.results += _evaluated([(row, source) for row, source in done if "benchmark" in row], names, reference)
    for row, source in zip(rows, sources, strict=True):
        if row["status"] != DONE:
            error = f"not finite: {reason(row)}" if row["status"] == NOT_FINITE else reason(row)
            error = f"{row['task']}: {error}" if "benchmark" in row else error
            findings.failures.append(
                Failure(row["method"], budget_of(row), str(row.get("benchmark", row["task"])), error, source)
            )
    add_places([row for row, _ in done], names, findings)


def _compared(row: Row, rows: list[Row], names: dict[str, str], source: int, reference: str | None) -> Result:
    difference, values = over_full_cache(row, rows, reference), row["sample_values"]
    return Result(
        quality=difference["quality"],
        quality_error=statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None,
        over_full_cache=difference["over_full_cache"],
        over_full_cache_error=difference["over_full_cache_error"],
        samples_key=row["samples_key"],
        sample_values=values,
        task=row["task"],
        metric=row["main_metric"],
        **_shared(row, row, names, source),
    )


def _evaluated(rows: list[tuple[Row, int]], names: dict[str, str], reference: str | None) -> list[Result]:
    by_key = {row["key"]: (row, source) for row, source in rows}
    figures = benchmark_figures([row for row, _ in rows])
    results = []
    for figure in figures:
        row, source = by_key[figure["keys"][0]]
        full = _full_figure(row, figure, figures, by_key, reference)
        own = [by_key[key][0] for key in figure["keys"]]
        others = [] if full is None else [by_key[key][0] for key in full["keys"]]
        results.append(
            Result(
                quality=figure["value"],
                quality_error=figure["error"],
                over_full_cache=None if full is None else figure["value"] - full["value"],
                over_full_cache_error=_paired(own, others),
                samples_key=_samples_key(own),
                task_values=[row.get("sample_values", []) for row in own],
                task=figure["benchmark"],
                metric=figure["metric"],
                **_shared(figure, row, names, source),
            )
        )
    return results


def _samples_key(rows: list[Row]) -> str | None:
    """Name the questions of a benchmark; None where a task has not kept what it made of each."""
    keys = [row.get("samples_key") for row in rows]
    return None if not keys or None in keys else " ".join(map(str, keys))


def _paired(rows: list[Row], others: list[Row]) -> float | None:
    """Return the standard error of the difference of two benchmarks; None: not of the same questions."""
    key = _samples_key(rows)
    if key is None or key != _samples_key(others):
        return None
    return paired_error([row["sample_values"] for row in rows], [row["sample_values"] for row in others])


def _full_figure(
    row: Row, figure: Row, figures: list[Row], by_key: dict[str, tuple[Row, int]], reference: str | None
) -> Row | None:
    """Find the full cache's figure: of its model; for own gates of the reference, or else the only stock model."""
    found: dict[str, Row] = {}
    wanted = reference if row["own_gates"] else row["model"]
    for other in figures:
        (first, _), same = by_key[other["keys"][0]], (other["benchmark"], list(other["tasks"]))
        stock = first["budget"] is None and not first["own_gates"] and other is not figure
        if (
            stock
            and wanted in (None, first["model"], first.get("named"))
            and same == (figure["benchmark"], list(figure["tasks"]))
        ):
            found.setdefault(first["model"], other)
    return next(iter(found.values())) if len(found) == 1 else None


def _shared(figures: Row, row: Row, names: dict[str, str], source: int) -> dict[str, Any]:
    return {
        "name": names[row["method"]],
        "method": row["method"],
        "model": row["model"],
        "budget": budget_of(row),
        "own_gates": row["own_gates"] and row["budget"] is None,
        "is_full": row["budget"] is None and not row["own_gates"],
        "higher_is_better": row["higher_is_better"],
        "requested_ratio": figures["requested_ratio"],
        "achieved_ratio": figures["mean_achieved_ratio"],
        "bytes_per_token": figures["mean_bytes_allocated_per_token"],
        "bytes_allocated": figures["peak_bytes_allocated"],
        "prefill_tokens_per_second": row.get("prefill_tokens_per_second"),
        "decode_tokens_per_second": row.get("decode_tokens_per_second"),
        "samples": figures["samples"],
        "source": source,
    }
