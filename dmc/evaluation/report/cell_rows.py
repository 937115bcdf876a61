"""Rows of compare.py and evaluate.py as results, failures and heatmaps."""

from __future__ import annotations

import math
import statistics
from typing import Any

from dmc.evaluation.compare import DONE, FAILED
from dmc.evaluation.compare_report import comparable, over_full_cache, requested
from dmc.evaluation.evaluate_report import benchmark_figures
from dmc.evaluation.report.findings import Failure, Findings, Heatmap, Result
from dmc.evaluation.row_store import Row

FULL_CACHE = "full cache"
SAME = 0.01
"""Heads whose ratios differ by less, relatively, are shown no heatmap."""


def add_cells(rows: list[Row], folder: str, findings: Findings) -> None:
    """Add the newest row of every cell; the tasks of a benchmark become their mean.

    Args:
        rows: in the order in which they were written.
        folder: where they lie.
        findings: to add to.
    """
    current = comparable(rows)
    sources = [findings.add_source(folder, row["provenance"], row.get("device", "")) for row in current]
    if len(current) < len(rows):
        findings.notes.append(
            f"{folder}: {len(rows) - len(current)} rows of other settings or earlier versions of a model are left out"
        )
    several = len({row["model"] for row in current if not row["own_gates"]}) > 1
    names = {row["method"]: _short_name(row, several) for row in current}
    done = [(row, source) for row, source in zip(current, sources, strict=True) if row["status"] == DONE]
    compared = [pair for pair in done if "benchmark" not in pair[0]]
    for row, source in compared:
        findings.results.append(_compared(row, current, names, source))
    findings.results += _evaluated([pair for pair in done if "benchmark" in pair[0]], names)
    for row, source in zip(current, sources, strict=True):
        if row["status"] == FAILED:
            failure = Failure(row["method"], _budget(row, failed=True), row["task"], row["error"], source)
            findings.failures.append(failure)
    findings.head_ratios += _head_ratios([row for row, _ in done], names, findings)
    findings.needles += _needles([row for row, _ in done], names)


def _short_name(row: Row, several_models: bool) -> str:
    if row["own_gates"] and row["budget"] is None:
        return f"{row['model']} (own gates)"
    name = FULL_CACHE if row["budget"] is None else row["policy"]
    return f"{row['model']} {name}" if several_models or row["own_gates"] else name


def _budget(row: Row, failed: bool = False) -> str:
    if row["budget"] is None and not row["own_gates"]:
        return FULL_CACHE
    return "own gates" if failed and row["requested_ratio"] is None and row["budget"] is None else requested(row)


def _compared(row: Row, rows: list[Row], names: dict[str, str], source: int) -> Result:
    difference, values = over_full_cache(row, rows), row["sample_values"]
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


def _evaluated(rows: list[tuple[Row, int]], names: dict[str, str]) -> list[Result]:
    by_key = {row["key"]: (row, source) for row, source in rows}
    figures = benchmark_figures([row for row, _ in rows])
    results = []
    for figure in figures:
        row, source = by_key[figure["keys"][0]]
        full = _full_figure(row, figure, figures, by_key)
        errors = None if full is None else (figure["error"], full["error"])
        results.append(
            Result(
                quality=figure["value"],
                quality_error=figure["error"],
                over_full_cache=None if full is None else figure["value"] - full["value"],
                over_full_cache_error=None if errors is None or None in errors else math.hypot(*errors),
                task=figure["benchmark"],
                metric=figure["metric"],
                **_shared(figure, row, names, source),
            )
        )
    return results


def _full_figure(row: Row, figure: Row, figures: list[Row], by_key: dict[str, tuple[Row, int]]) -> Row | None:
    """Find the full cache's figure for a figure's benchmark: of its model, of the first stock model for own gates."""
    for other in figures:
        (first, _), same = by_key[other["keys"][0]], (other["benchmark"], list(other["tasks"]))
        stock = first["budget"] is None and not first["own_gates"] and other is not figure
        of_its_model = row["own_gates"] or first["model"] == row["model"]
        if stock and of_its_model and same == (figure["benchmark"], list(figure["tasks"])):
            return other
    return None


def _shared(figures: Row, row: Row, names: dict[str, str], source: int) -> dict[str, Any]:
    return {
        "name": names[row["method"]],
        "method": row["method"],
        "budget": _budget(row),
        "own_gates": row["own_gates"] and row["budget"] is None,
        "is_full": row["budget"] is None and not row["own_gates"],
        "higher_is_better": row["higher_is_better"],
        "requested_ratio": figures["requested_ratio"],
        "achieved_ratio": figures["achieved_ratio"],
        "bytes_per_token": figures["bytes_allocated_per_token"],
        "bytes_allocated": figures["bytes_allocated"],
        "prefill_tokens_per_second": row.get("prefill_tokens_per_second"),
        "decode_tokens_per_second": row.get("decode_tokens_per_second"),
        "samples": figures["samples"],
        "source": source,
    }


def _head_ratios(rows: list[Row], names: dict[str, str], findings: Findings) -> list[Heatmap]:
    found, even = [], set()
    for row in rows:
        ratios = row.get("head_ratios")
        if ratios is None or (row["budget"] is None and not row["own_gates"]):
            continue
        flat = [ratio for layer in ratios for ratio in layer]
        title = f"{names[row['method']]}, {_budget(row)}, {row['task']}"
        if max(flat) < (1 + SAME) * min(flat):
            even.add(names[row["method"]])
        else:
            layers, heads = [str(layer) for layer in range(len(ratios))], [str(head) for head in range(len(ratios[0]))]
            found.append(Heatmap(title, ratios, layers, heads))
    if even:
        findings.notes.append(f"no heatmap, for all heads have the same CR: {', '.join(sorted(even))}")
    return found


def _needles(rows: list[Row], names: dict[str, str]) -> list[Heatmap]:
    """Put rows whose tasks differ in `length` and `depth` alone into one heatmap per method and budget."""
    found: dict[str, dict[tuple[float, float], float]] = {}
    for row in rows:
        task = row["settings"]["task"]
        for cell in row.get("grid") or [{**task, row["main_metric"]: row["metrics"][row["main_metric"]]}]:
            if "length" in cell and "depth" in cell:
                title = f"{names[row['method']]}, {_budget(row)}"
                found.setdefault(title, {})[cell["depth"], cell["length"]] = cell[row["main_metric"]]
    heatmaps = []
    for title, cells in found.items():
        depths, lengths = (sorted({place[axis] for place in cells}) for axis in (0, 1))
        values = [[cells.get((depth, length)) for length in lengths] for depth in depths]
        heatmaps.append(Heatmap(title, values, [f"{each:g}" for each in depths], [f"{each:,g}" for each in lengths]))
    return heatmaps
