"""Sheets of small heatmaps: needles over length and depth, compression ratios over layers and heads."""

from __future__ import annotations

import math
from collections.abc import Iterator

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from dmc.results.report.drawing import MUTED, Drawing, drawing
from dmc.results.report.findings import Heatmap

MOST_COLUMNS = 4
MOST_SHAPES = 700
"""Cells of a panel beyond which the page holds them as pixels."""


def draw_needles(heatmaps: list[Heatmap]) -> list[Drawing]:
    """Draw what one task's methods find, length to the right, depth down."""
    caption = "Share of needles found: light is all, dark is none. Across: length in tokens. Down: depth in the text."
    known = [value for heatmap in heatmaps for value in _values(heatmap)]
    title = f"{heatmaps[0].task}: needles by length and depth"
    return _draw_sheets(title, caption, heatmaps, Normalize(min(0.0, *known), max(1.0, *known)))


def draw_head_ratios(heatmaps: list[Heatmap]) -> list[Drawing]:
    """Draw the compression ratios of one task's methods, KV heads to the right, layers down."""
    caption = "Compression ratio: dark is little, light is much. Across: KV heads. Down: layers."
    known = [value for heatmap in heatmaps for value in _values(heatmap)]
    title = f"{heatmaps[0].task}: CR of layers and heads"
    return _draw_sheets(title, caption, heatmaps, LogNorm(min(1.0, *known), max(2.0, *known)))


def _draw_sheets(title: str, caption: str, heatmaps: list[Heatmap], norm: Normalize) -> list[Drawing]:
    """Draw one sheet, or two of the same shape where it would be long."""
    lines = list(_lines(heatmaps))
    most = len(lines) if len(lines) < 4 else -(-len(lines) // 2)
    return [_draw_sheet(title, caption, lines[start : start + most], norm) for start in range(0, len(lines), most)]


def _draw_sheet(title: str, caption: str, lines: list[list[Heatmap]], norm: Normalize) -> Drawing:
    columns = max(map(len, lines))
    size = 0.55 + 0.06 * min(24, len(lines[0][0].rows))
    height = 0.75 + (size + 0.38) * len(lines)
    with drawing(title, caption, height, shape=(len(lines), columns)) as canvas:
        padded = (line[place] if place < len(line) else None for line in lines for place in range(columns))
        for axes, heatmap in zip(canvas.panels, padded, strict=True):
            if heatmap is None:
                axes.set_axis_off()
            else:
                _draw_panel(canvas, axes, heatmap, norm)
        bar = canvas.figure.colorbar(
            canvas.panels[0].collections[0],
            ax=canvas.panels,
            location="top",
            ticks=LogLocator(base=2) if isinstance(norm, LogNorm) else None,
            aspect=50,
            fraction=0.3 / height,
            pad=0.1 / height,
        )
        bar.solids.set(rasterized=False, edgecolor="face")  # type: ignore[union-attr]  # shapes, not pixels
        bar.ax.tick_params(labelsize=7)
        bar.ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        bar.ax.xaxis.set_minor_formatter(NullFormatter())
        bar.outline.set_visible(False)  # type: ignore[operator]
    return canvas


def _lines(heatmaps: list[Heatmap]) -> Iterator[list[Heatmap]]:
    """Give every method with several budgets lines of its own; the others share theirs."""
    single: list[Heatmap] = []
    for name in dict.fromkeys(each.name for each in heatmaps):
        own = [each for each in heatmaps if each.name == name]
        if len(own) == 1:
            single += own
        else:
            yield from (own[start : start + MOST_COLUMNS] for start in range(0, len(own), MOST_COLUMNS))
    yield from (single[start : start + MOST_COLUMNS - 1] for start in range(0, len(single), MOST_COLUMNS - 1))


def _draw_panel(canvas: Drawing, axes: Axes, heatmap: Heatmap, norm: Normalize) -> None:
    values = [[math.nan if value is None else value for value in row] for row in heatmap.values]
    rows, columns, known = len(values), len(values[0]), _values(heatmap)
    mesh = axes.pcolormesh(values, cmap="cividis", norm=norm, edgecolors="face", linewidth=0.2)
    mesh.set_rasterized(rows * columns > MOST_SHAPES)
    mean = sum(known) / max(1, len(known))
    words = f"{heatmap.title}: mean {mean:.3g}, lowest {min(known):.3g}, highest {max(known):.3g}" if known else "empty"
    canvas.tip(mesh, heatmap.method, words)
    axes.invert_yaxis()
    axes.set_title(heatmap.title, fontsize=7, color=MUTED, pad=3)
    axes.spines[:].set_visible(False)
    ends = sorted({0, columns - 1}), sorted({0, rows - 1})
    axes.set_xticks([place + 0.5 for place in ends[0]], [heatmap.columns[place] for place in ends[0]], fontsize=6)
    axes.set_yticks([place + 0.5 for place in ends[1]], [heatmap.rows[place] for place in ends[1]], fontsize=6)
    axes.tick_params(pad=1.5)


def _values(heatmap: Heatmap) -> list[float]:
    return [value for row in heatmap.values for value in row if value is not None]
