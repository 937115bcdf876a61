"""What rows say place by place: the CR of every head, figures by length and depth, figures along one axis."""

from __future__ import annotations

from collections.abc import Sequence

from dmc.results.report.findings import Curve, Findings, Heatmap
from dmc.results.report.names import FULL_CACHE, budget_of, title_of
from dmc.results.store import Row

SAME = 0.01
"""Where the ratios of heads differ by less, relatively, there is no heatmap."""


def add_places(rows: list[Row], names: dict[str, str], findings: Findings) -> None:
    """Add heatmaps and curves.

    Args:
        rows: finished.
        names: of their methods.
        findings: to add to.
    """
    findings.needles += [_needles(row, names) for row in rows if "by_length_and_depth" in row]
    findings.curves += [curve for row in rows for curve in _curves(row, names)]
    even = []
    for row in rows:
        ratios = [ratio for layer in row.get("head_ratios", []) for ratio in layer]
        if not ratios or budget_of(row) == FULL_CACHE:
            continue
        if max(ratios) < (1 + SAME) * min(ratios):
            even.append(names[row["method"]])
        else:
            place = (names[row["method"]], row["method"], title_of(row, names), row["task"])
            findings.head_ratios.append(ratio_heatmap(*place, row["head_ratios"]))
    if even:
        findings.notes.append(f"no heatmap, for every head has the same CR: {', '.join(dict.fromkeys(even))}")


def ratio_heatmap(name: str, method: str, title: str, task: str, ratios: Sequence[Sequence[float | None]]) -> Heatmap:
    """Put the ratios of a model's heads, layer by layer, into a heatmap."""
    layers, heads = map(str, range(len(ratios))), map(str, range(len(ratios[0])))
    return Heatmap(name, method, title, task, list(map(list, ratios)), list(layers), list(heads))


def _needles(row: Row, names: dict[str, str]) -> Heatmap:
    table = row["by_length_and_depth"]
    values = [list(column) for column in zip(*table[row["main_metric"]], strict=True)]
    depths, lengths = [f"{each:g}" for each in table["depth"]], [f"{each:,g}" for each in table["length"]]
    name = names[row["method"]]
    return Heatmap(name, row["method"], title_of(row, names), row["task"], values, rows=depths, columns=lengths)


def _curves(row: Row, names: dict[str, str]) -> list[Curve]:
    """Read the figures over one axis, such as the loss by position."""
    axes = [name.removeprefix("by_") for name in row if name.startswith("by_")]
    tables = {axis: row[f"by_{axis}"] for axis in axes if len(row[f"by_{axis}"].get(axis, [])) > 1}
    metric = row["main_metric"]
    return [
        Curve(
            title=title_of(row, names),
            method=row["method"],
            own_gates=row["own_gates"] and row["budget"] is None,
            is_full=budget_of(row) == FULL_CACHE,
            task=row["task"],
            axis=axis,
            metric=metric,
            places=table[axis],
            values=table[metric],
        )
        for axis, table in tables.items()
    ]
