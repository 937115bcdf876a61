"""Quality against the bytes of the cache: one panel per task, one line per method, one point per budget."""

from __future__ import annotations

import math
from typing import IO, Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

MARKERS = "osD^v<>Pph"


def plot_quality(rows_by_task: dict[str, list[dict[str, Any]]], file: IO[bytes]) -> None:
    """Draw finished rows as a PNG.

    Args:
        rows_by_task: of each task the rows, with their `quality`.
        file: to write to.
    """
    lines = list(dict.fromkeys(row["method"] for rows in rows_by_task.values() for row in rows))
    style = {
        name: {"color": colormaps["tab20"](number % 20), "marker": MARKERS[number % len(MARKERS)]}
        for number, name in enumerate(lines)
    }
    columns = min(3, len(rows_by_task))
    height = -(-len(rows_by_task) // columns)
    figure = Figure(figsize=(5 * columns + 2.5, 3.8 * height), layout="constrained")
    panels = figure.subplots(height, columns, squeeze=False).flatten()
    for panel, (task, rows) in zip(panels, rows_by_task.items(), strict=False):
        _draw(panel, task, rows, style)
    for panel in panels[len(rows_by_task) :]:
        panel.set_axis_off()
    handles = {
        label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8)
    figure.savefig(file, dpi=150, format="png")


def _draw(panel: Axes, task: str, rows: list[dict[str, Any]], style: dict[str, dict[str, Any]]) -> None:
    for name in dict.fromkeys(row["method"] for row in rows):
        own = sorted(
            (row for row in rows if row["method"] == name), key=lambda row: row["mean_bytes_allocated_per_token"]
        )
        sizes, qualities = [row["mean_bytes_allocated_per_token"] for row in own], [row["quality"] for row in own]
        panel.plot(sizes, qualities, label=name, linewidth=1.2, markersize=5, **style[name])
        if own[0]["budget"] is None and not own[0]["own_gates"]:
            panel.axhline(qualities[0], color=style[name]["color"], linewidth=0.8, linestyle=":")
    sizes, qualities = [row["mean_bytes_allocated_per_token"] for row in rows], [row["quality"] for row in rows]
    panel.set_xscale("log", base=2)
    panel.set_xlim(0.93 * 2 ** math.floor(math.log2(min(sizes))), 1.07 * 2 ** math.ceil(math.log2(max(sizes))))
    if min(qualities) == max(qualities):
        panel.set_ylim(qualities[0] - 0.5, qualities[0] + 0.5)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_xlabel("cache bytes per token, over all positions predicted")
    better = "higher" if rows[0]["higher_is_better"] else "lower"
    panel.set_ylabel(f"{rows[0]['main_metric']} ({better} is better)")
    panel.set_title(task)
    panel.grid(alpha=0.3)
