"""Needles found over length and depth, and compression ratios over layers and heads."""

from __future__ import annotations

import math

from dmc.evaluation.report.drawing import Drawing, drawing
from dmc.evaluation.report.findings import Heatmap

MOST_NUMBERS = 120
"""Cells up to which each has its number written into it."""
NEEDLE_CAPTION = "What was found of a needle at a depth (share of the text before it) in a text of a length (tokens)."
RATIO_CAPTION = "CR of every layer and KV head."


def draw_needles(heatmap: Heatmap) -> Drawing:
    """Draw the share of needles found, length to the right, depth down."""
    known = [value for row in heatmap.values for value in row if value is not None]
    top = max(1.0, *known)
    return _draw(heatmap.title, NEEDLE_CAPTION, heatmap, ("length (tokens)", "depth"), (0.0, top))


def draw_head_ratios(heatmap: Heatmap) -> Drawing:
    """Draw compression ratios, KV heads to the right, layers down."""
    known = [value for row in heatmap.values for value in row if value is not None]
    limits = min(1.0, *known), max(known)
    return _draw(heatmap.title, RATIO_CAPTION, heatmap, ("KV head", "layer"), limits)


def _draw(
    title: str, caption: str, heatmap: Heatmap, axes_names: tuple[str, str], limits: tuple[float, float]
) -> Drawing:
    rows, columns = len(heatmap.rows), len(heatmap.columns)
    with drawing(title, caption, height=min(5.0, max(1.9, 1.0 + 0.22 * rows)), width=3.3) as canvas:
        axes = canvas.axes
        values = [[math.nan if value is None else value for value in row] for row in heatmap.values]
        image = axes.imshow(values, aspect="auto", cmap="cividis", vmin=limits[0], vmax=limits[1], interpolation="none")
        if rows * columns <= MOST_NUMBERS and columns <= 12:
            middle = sum(limits) / 2
            for row, line in enumerate(heatmap.values):
                for column, value in enumerate(line):
                    text, dark = ("–", True) if value is None else (f"{value:.3g}", value < middle)
                    color = "#777777" if value is None else "#ffffff" if dark else "#000000"
                    axes.text(column, row, text, ha="center", va="center", fontsize=7, color=color)
        across, down = max(1, math.ceil(columns / 8)), max(1, math.ceil(rows / 12))
        axes.set_xticks(range(0, columns, across), heatmap.columns[::across], fontsize=7.5)
        axes.set_yticks(range(0, rows, down), heatmap.rows[::down], fontsize=7.5)
        axes.set(xlabel=axes_names[0], ylabel=axes_names[1])
        axes.spines[:].set_visible(False)
        bar = canvas.figure.colorbar(image, ax=axes, pad=0.02, aspect=14)
        bar.outline.set_visible(False)  # type: ignore[operator]
        bar.ax.tick_params(labelsize=7)
    return canvas
