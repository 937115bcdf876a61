"""Every plot of results: figures over tables, as SVG for the page, whose colors follow light and dark, and as PNG.

Results are lines of `statistics.summarize`, named by `name_methods`. Blue is what no other point beats, orange a model
with gates of its own, green the full cache.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from xml.dom import minidom

import matplotlib
import numpy
import pandas
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator
from matplotlib.transforms import Bbox

from dmc.results.statistics import pareto_front

INK, MUTED, LINE, DIM = "#1c2433", "#5a6577", "#dfe3ea", "#aab3c1"
FRONT, GATES, FULL = "#0067b4", "#c4500c", "#16805f"
COLORS = {"ink": INK, "muted": MUTED, "line": LINE, "dim": DIM, "front": FRONT, "gates": GATES, "full": FULL}
"""CSS variables of `page.css` and their values in a PNG; the hues stay apart for color-blind readers."""
SETTINGS: dict[str, Any] = {
    **{"svg.fonttype": "none", "font.size": 9, "text.color": INK, "grid.color": LINE, "grid.linewidth": 0.7},
    "text.parse_math": False,  # names come from users and may hold dollars
    **{"axes.edgecolor": LINE, "axes.labelcolor": MUTED, "axes.axisbelow": True, "axes.titlesize": 9},
    **{"axes.spines.top": False, "axes.spines.right": False, "xtick.color": MUTED, "ytick.color": MUTED},
    **{"xtick.major.size": 0, "ytick.major.size": 0, "xtick.minor.size": 0, "ytick.minor.size": 0},
}
WIDTH = 5.0
"""Inches of a panel; two drawings stand side by side on a wide page."""
OUTLIER = 3.0
"""Points worse than the upper quartile by so many times the middle half's spread are drawn at the edge."""
MOST_NAMES, MOST_COLUMNS, MOST_ROWS, MOST_SHAPES, MOST_PLACES = 8, 3, 8, 700, 64
"""Lines that all have their name; heatmaps across and down; cells beyond which one is pixels; points of a course."""
SAME = 1.01
"""Where the values of heads differ by less, relatively, there is no heatmap."""
WORDS = FuncFormatter(lambda value, _: f"{value:,.0f}" if abs(value) >= 10 else f"{value:.2g}")
Spot = tuple[float, float]
Heatmap = tuple[str, str, pandas.DataFrame]
"""Method, its label, numbers over two axes; the first row is the top."""


@dataclass
class Plot:
    """A figure with a tooltip for each mark."""

    title: str
    caption: str
    figure: Figure
    panels: list[Axes]
    tips: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Method and tooltip by mark; the marks of one method are highlighted together."""

    def tip(self, artist: Artist, method: str, text: str = "") -> None:
        """Give a mark a method and a tooltip."""
        artist.set_gid(f"mark{len(self.tips)}")
        self.tips[f"mark{len(self.tips)}"] = method, text

    def png(self) -> bytes:
        """Return the figure as a PNG."""
        file = io.BytesIO()
        with matplotlib.rc_context(SETTINGS):
            self.figure.savefig(file, format="png", dpi=160, facecolor="white")
        return file.getvalue()

    def svg(self, number: int) -> str:
        """Return the figure as SVG for a page; `number` makes its definitions unique within the page."""
        file = io.StringIO()
        with matplotlib.rc_context(SETTINGS | {"svg.hashsalt": f"dmc{number}"}):
            self.figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        root: Any = minidom.parseString(file.getvalue()).documentElement
        for node in [*root.getElementsByTagName("metadata"), *root.getElementsByTagName("style")]:
            node.parentNode.removeChild(node)
        for name in ("width", "height"):
            root.removeAttribute(name)
        _describe(root, f"{self.title}. {self.caption}", role="group")
        for group in root.getElementsByTagName("g"):
            name = group.getAttribute("id")
            if name in self.tips:
                method, text = self.tips[name]
                told = {"data-tip": text, "tabindex": "0"} if text else {}
                _describe(
                    group, text, **{"class": "mark", "data-method": method}, **told, **({"role": "img"} if text else {})
                )
            if name:
                group.removeAttribute("id")
        text = root.toxml()
        for name, color in COLORS.items():
            text = text.replace(color, f"var(--{name})")
        return str(text)


def _describe(node: Any, label: str, **attributes: str) -> None:
    for name, value in (attributes | ({"aria-label": label} if label else {})).items():
        node.setAttribute(name, value)


@contextmanager
def _plot(
    title: str, caption: str, height: float = 3.7, shape: tuple[int, int] = (1, 1), width: float = WIDTH
) -> Iterator[Plot]:
    """Open an empty figure of panels in rows and columns; `height` and `width` are the whole figure's, in inches."""
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(width, height), layout="constrained")
        plot = Plot(title, caption, figure, list(figure.subplots(*shape, squeeze=False).flatten()))
        yield plot
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # it has done its work, and would do it again at every save


def name_methods(lines: pandas.DataFrame, several: bool) -> pandas.DataFrame:
    """Add `name`, the method with its model if there are several, and `label`, the same with its budget.

    Args:
        lines: of a summary, or of a frame of measurements with the column `asked`.
        several: whether there are several stock models.
    """

    def name(line: Any) -> str:
        if line.learned and pandas.isna(line.budget):
            return f"{line.variant} (learned)"
        own = "full cache" if line.is_full else str(line.policy)
        return f"{line.variant} {own}" if several or line.learned else own

    names = [name(line) for line in lines.itertuples()]
    asked = lines["asked"] if len(lines) else []
    label = [each if told == "full cache" else f"{each} at {told}" for each, told in zip(names, asked, strict=True)]
    return lines.assign(name=names, label=label)


def cost_of(lines: pandas.DataFrame) -> str:
    """Return the measure of memory to draw quality over: bytes, or CR where bytes are unknown."""
    return "bytes_per_token" if lines["bytes_per_token"].notna().all() else "achieved_ratio"


def draw_quality(tasks: Sequence[pandas.DataFrame], over: str = "bytes_per_token") -> Plot:
    """Draw quality against `bytes_per_token` or `achieved_ratio`, a panel for the lines of each task."""
    words = {"bytes_per_token": ("bytes", "cache bytes per token"), "achieved_ratio": ("achieved CR", "achieved CR")}
    caption = "Blue: the front, which no other point beats in both. Diamonds: models with gates of their own. Dotted: "
    caption += "the full cache."
    name = tasks[0]["task"].iloc[0] if len(tasks) == 1 else f"{len(tasks)} tasks"
    columns = min(3, len(tasks))
    shape = -(-len(tasks) // columns), columns
    title = f"{name}: quality against {words[over][0]}"
    with _plot(title, caption, 3.7 * shape[0], shape, WIDTH * columns) as plot:
        named = []
        for axes, lines in itertools.zip_longest(plot.panels, tasks):
            if lines is None:
                axes.set_axis_off()
                continue
            named.append((axes, *_draw_quality(plot, axes, lines.reset_index(drop=True), over)))
            axes.set_xlabel(words[over][1])
            if len(tasks) > 1:
                axes.set_title(lines["task"].iloc[0])
        plot.figure.draw_without_rendering()  # lays all panels out
        for axes, labels, points in named:
            _place_labels(axes, labels, points)
    return plot


def _draw_quality(
    plot: Plot, axes: Axes, lines: pandas.DataFrame, over: str
) -> tuple[list[tuple[float, float, str, str]], list[Spot]]:
    """Draw one task; returns the labels, and the points that these keep clear of."""
    cost = lines[over] if over == "bytes_per_token" else 1 / lines[over]
    higher, front = bool(lines["higher_is_better"].iloc[0]), pareto_front(lines.assign(bytes_per_token=cost))
    worse = -lines["value"] if higher else lines["value"]
    limit = worse.quantile(0.75) + OUTLIER * (worse.quantile(0.75) - worse.quantile(0.25))
    outlier = (worse > limit) & (len(lines) > 3) & (limit > worse.min())
    low, high = lines["value"][~outlier].min(), lines["value"][~outlier].max()
    room = 0.09 * (high - low) or max(abs(high) * 0.1, 0.1)
    edge = low - room if higher else high + room
    axes.set(
        ylim=(low - room, high + room),
        ylabel=f"{lines['metric'].iloc[0]} ({'higher' if higher else 'lower'} is better)",
    )
    _log_axis(axes, lines[over], 0.12, 0.08)
    axes.grid(True)
    shown = lines.assign(
        x=lines[over], y=lines["value"].where(~outlier, edge), front=lines.index.isin(front), outlier=outlier
    )
    for _, own in shown[~outlier].groupby("name", sort=False):
        if len(own) > 1:
            (line,) = axes.plot(*own.sort_values("x")[["x", "y"]].to_numpy().T, color=DIM, linewidth=0.8, alpha=0.6)
            plot.tip(line, own["method"].iloc[0])
    spots = [(shown["x"][label], shown["y"][label]) for label in front if not outlier[label]]
    axes.plot(*zip(*spots, strict=True), color=FRONT, linewidth=1.6)
    points, labels = [*zip(shown["x"], shown["y"], strict=True), *_along(spots)], []
    for each in shown.sort_values(["front", "learned", "is_full"]).itertuples():
        marker = ("v" if higher else "^") if each.outlier else "s" if each.is_full else "D" if each.learned else "o"
        color = _color(each, FRONT if each.front else DIM)
        (mark,) = axes.plot(
            each.x, each.y, marker, color=color, markersize=5.5, markeredgewidth=0, clip_on=False, zorder=3
        )
        plot.tip(mark, each.method, describe(each))
        if each.is_full and not each.outlier:
            axes.axhline(each.value, color=FULL, linewidth=0.9, linestyle=(0, (1, 2.5)))
            points += _along([(x, each.value) for x in axes.get_xlim()])
        if color != DIM and not each.outlier:
            labels.append((each.x, each.y, each.label, color))
    for name, own in shown[~outlier].groupby("name", sort=False):
        if not {text for *_, text, _ in labels} & {*own["label"]}:  # a method without a name yet, at its largest cache
            labels.append((*own.sort_values("x")[["x", "y"]].iloc[-1], str(name), DIM))
    if outlier.any():
        cut = ", ".join(f"{each.label} ({each.value:.4g})" for each in lines[outlier].itertuples())
        plot.caption += f" Far outside, triangles at the edge: {cut}."
    return labels, points


def describe(line: Any) -> str:
    """Write a line of a summary as its point's tooltip."""
    error = "" if pandas.isna(line.value_error) else f" ± {line.value_error:.2g}"
    text = f"{line.label}: {line.metric} {line.value:.4g}{error}, achieved CR {line.achieved_ratio:.2f}"
    return f"{text}, {line.bytes_per_token:,.0f} bytes/token"


def _color(line: Any, other: str) -> str:
    return FULL if line.is_full else GATES if line.learned else other


def _log_axis(axes: Axes, values: Iterable[float], least: float, share: float = 0.0) -> None:
    """Make x logarithmic around values, with room at both ends and ticks at powers of 2."""
    known = [math.log2(value) for value in values]
    room = max(least, share * (max(known) - min(known)))
    axes.set_xscale("log", base=2)
    axes.set_xlim(2 ** (min(known) - room), 2 ** (max(known) + room))
    axes.xaxis.set_major_locator(LogLocator(2, subs=(1.0,) if max(known) - min(known) > 1.8 else (1.0, 2**0.5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(WORDS)


def draw_speed(speeds: pandas.DataFrame, source: str = "") -> Plot:
    """Draw tokens/s against time per token of one benchmark; the points of a line are batch sizes.

    Args:
        speeds: lines of `tables.speeds_of` with a batch.
        source: where they come from, for the title.
    """
    title = f"Tokens/s against latency, prompts of {speeds['length'].iloc[0]:,.0f}{source}"
    color = dict.fromkeys(speeds["policy"], GATES)
    for name, ratio in zip(speeds["policy"], speeds["requested_ratio"], strict=True):
        if name.startswith("engine"):
            color[name] = FULL if ratio == 1 else FRONT if ratio == speeds["requested_ratio"].max() else DIM
    told = [
        f"batch {each.batch:.0f}: {each.tokens_per_second:,.1f} tokens/s, {each.milliseconds:,.1f} ms/token, "
        f"{each.peak_bytes:,.0f} cache bytes"
        for each in speeds.itertuples()
    ]
    points = speeds.assign(name=speeds["policy"], place=speeds["batch"].map("{:.0f}".format), told=told)
    points = points.assign(latency=points["milliseconds"]).sort_values("batch")
    caption = "Up and to the left is better. The numbers are batch sizes."
    return _draw_throughput(points, title, caption, "time per output token (ms)", color)


def draw_load(loads: pandas.DataFrame, full: str | None = None) -> Plot:
    """Draw throughput over latency of servers under load; the points of a line are rates at which requests came.

    Args:
        loads: `name`, `rate` (missing: saturated), `tokens_per_second`, `seconds`; the median of each rate is drawn.
        full: the name whose cache is full.
    """
    found = loads.groupby(["name", "rate"], dropna=False, as_index=False).median()
    found["place"] = ["saturated" if pandas.isna(rate) else f"{rate:g}" for rate in found["rate"]]
    found["told"] = [
        f"{each.place}: {each.tokens_per_second:,.1f} tokens/s, {each.seconds:,.2f} s" for each in found.itertuples()
    ]
    color = {name: FULL if name == full else GATES for name in found["name"]}
    title, caption = "Throughput over latency under load", "Up and to the left is better. Numbers: requests/s."
    points = found.assign(latency=found["seconds"]).sort_values("rate")
    return _draw_throughput(points, title, caption, "95 % of requests end within (s)", color)


def _draw_throughput(points: pandas.DataFrame, title: str, caption: str, x: str, color: dict[str, str]) -> Plot:
    """Draw `tokens_per_second` over `latency`, a line for each `name`; `place` labels a point, `told` are its words."""
    with _plot(title, caption) as plot:
        axes, labels, covered = plot.panels[0], [], []
        for name, own in points.groupby("name", sort=False):
            spots = list(zip(own["latency"], own["tokens_per_second"], strict=True))
            covered += [*spots, *_along(spots)]
            axes.plot(*zip(*spots, strict=True), color=color[name], linewidth=1.6)
            for place, told, spot in zip(own["place"], own["told"], spots, strict=True):
                (mark,) = axes.plot(*spot, "o", color=color[name], markersize=5.5, markeredgewidth=0)
                plot.tip(mark, str(name), f"{name}, {told}")
                labels.append((*spot, place, MUTED))
            labels.insert(0, (*spots[-1], f"{name} ({labels.pop()[2]})", color[name]))
        axes.margins(0.14)
        _finish_plane(axes, x, "throughput (tokens/s)", labels, covered, from_zero=True)
    return plot


def draw_places(lines: pandas.DataFrame) -> list[Plot]:
    """Draw a metric of one task by its coordinates.

    By one, a line for each method; by something and the layer, for each method a line for each layer; by two others a
    heatmap for each method, of heads only where they differ.

    Args:
        lines: of a frame of measurements with one `task`, `metric` and `by`, and `name`, `label`.
    """
    task, metric, by = (str(lines[name].iloc[0]) for name in ("task", "metric", "by"))
    names, title = by.split(), f"{task}: {metric.replace('_', ' ')} by {by.replace(' ', ' and ')}"
    if len(names) == 1:
        return [_draw_curves(lines, title)] if lines[by].nunique() > 1 else []
    if names[1] == "layer":
        return [_draw_layers(own, f"{label}, {title}") for label, own in lines.groupby("label", sort=False)]
    down, across = names if names[0] == "layer" else names[::-1]
    maps, even = list[Heatmap](), []
    for (name, label), own in lines.groupby(["name", "label"], sort=False):
        values = own.groupby([down, across])["value"].mean().unstack()
        if by != "layer head" or values.max(axis=None) > SAME * values.min(axis=None):
            maps.append((own["method"].iloc[0], str(label), values))
        elif not own["is_full"].iloc[0]:
            even.append(str(name))
    caption = f"Dark is little, light is much. Across: {across}. Down: {down}."
    caption += f" The same in every head: {', '.join(dict.fromkeys(even))}." if even else ""
    return list(_draw_heatmaps(title, caption, maps, logarithmic=metric == "compression_ratio")) if maps else []


def _draw_curves(places: pandas.DataFrame, title: str) -> Plot:
    metric, axis = (str(places[name].iloc[0]) for name in ("metric", "by"))
    caption = "Green: full cache. Orange: models with gates of their own. Point at a line to see whose it is."
    with _plot(title, caption) as plot:
        axes, labels, points = plot.panels[0], [], []
        groups = [own for _, own in places.groupby("label", sort=False)]
        for own in sorted(groups, key=lambda each: (bool(each["learned"].iloc[0]), bool(each["is_full"].iloc[0]))):
            first, course = own.iloc[0], own.groupby(axis)["value"].mean()
            color = _color(first, DIM)
            (line,) = axes.plot(course.index, course, color=color, linewidth=1.0 if color == DIM else 1.6)
            plot.tip(line, first["method"], f"{first['label']}: {metric} {course.iloc[-1]:.4g} at the end")
            spots = list(course.items())
            points += _along(spots, steps=6)
            if color != DIM or len(groups) <= MOST_NAMES:
                labels.append((*spots[-1], first["label"], color))
        begin, end = axes.dataLim.intervalx
        axes.set_xlim(begin - 0.05 * (end - begin), end + 0.5 * (end - begin))
        _finish_plane(axes, axis, metric.replace("_", " "), labels, points)
    return plot


def _draw_layers(places: pandas.DataFrame, title: str) -> Plot:
    """Draw a thin line for each layer and a thick one for all, in at most `MOST_PLACES` points."""
    first, caption = places.iloc[0], "Orange: all layers. Gray: each layer. Point at a line to see which it is."
    axis, is_ratio = first["by"].split()[0], first["metric"] == "compression_ratio"
    table = places.pivot_table(index=axis, columns="layer", values="value")
    width = max(1, len(table) // MOST_PLACES)
    table = table[: len(table) // width * width]
    starts = table.index[::width]
    table = table.groupby(numpy.arange(len(table)) // width).mean()
    of_all = 1 / (1 / table).mean(axis=1) if is_ratio else table.mean(axis=1)
    with _plot(title, caption, 3.2) as plot:
        axes = plot.panels[0]
        for layer, course in table.items():
            (line,) = axes.plot(starts, course, color=DIM, linewidth=0.9)
            plot.tip(
                line, f"{first['method']}, layer {layer:.0f}", f"layer {layer:.0f}: {course.iloc[-1]:.3g} at the end"
            )
        (line,) = axes.plot(starts, of_all, color=GATES, linewidth=2.2)
        plot.tip(line, first["method"], f"all: {of_all.iloc[-1]:.3g} at the end")
        if first["metric"] == "segments":
            axes.set_yscale("symlog")  # linear up to 1: some lengths have none
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.set(xlabel=axis.replace("_", " "), ylabel=first["metric"].replace("_", " "))
        axes.grid(True)
    return plot


def _finish_plane(axes: Axes, x: str, y: str, labels: list[Any], points: list[Spot], from_zero: bool = False) -> None:
    axes.set(xlabel=x, ylabel=y, **({"xlim": (0, None), "ylim": (0, None)} if from_zero else {}))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.grid(True)
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]
    _place_labels(axes, labels, points)


def _draw_heatmaps(title: str, caption: str, maps: list[Heatmap], logarithmic: bool) -> Iterator[Plot]:
    """Draw small heatmaps in one scale, in sheets that fit a screen."""
    known = numpy.concatenate([values.to_numpy(dtype=float).ravel() for *_, values in maps])
    low, high = float(numpy.nanmin(known)), float(numpy.nanmax(known))
    norm = LogNorm(min(1.0, low), max(2.0, high)) if logarithmic else Normalize(min(0.0, low), max(1.0, high))
    columns = min(MOST_COLUMNS, len(maps))
    for start in range(0, len(maps), columns * MOST_ROWS):
        yield _draw_sheet(title, caption, maps[start : start + columns * MOST_ROWS], columns, norm)


def _draw_sheet(title: str, caption: str, maps: list[Heatmap], columns: int, norm: Normalize) -> Plot:
    lines = -(-len(maps) // columns)
    height = 0.75 + (0.93 + 0.06 * min(24, len(maps[0][-1]))) * lines
    with _plot(title, caption, height, (lines, columns)) as plot:
        for axes, heatmap in itertools.zip_longest(plot.panels, maps):
            if heatmap is None:
                axes.set_axis_off()
            else:
                _draw_heatmap(plot, axes, heatmap, norm)
        ticks = LogLocator(base=2) if isinstance(norm, LogNorm) else None
        first: Any = plot.panels[0].collections[0]
        place: Any = {"fraction": 0.3 / height, "pad": 0.1 / height}
        bar: Any = plot.figure.colorbar(first, ax=plot.panels, location="top", ticks=ticks, aspect=50, **place)
        bar.solids.set(rasterized=False, edgecolor="face")  # shapes, not pixels
        bar.ax.tick_params(labelsize=7)
        bar.ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        bar.ax.xaxis.set_minor_formatter(NullFormatter())
        bar.outline.set_visible(False)
    return plot


def _draw_heatmap(plot: Plot, axes: Axes, heatmap: Heatmap, norm: Normalize) -> None:
    method, label, table = heatmap
    values = table.to_numpy(dtype=float)
    mesh = axes.pcolormesh(values, cmap="cividis", norm=norm, edgecolors="face", linewidth=0.2)
    mesh.set_rasterized(values.size > MOST_SHAPES)
    words = f"mean {numpy.nanmean(values):.3g}, lowest {numpy.nanmin(values):.3g}, highest {numpy.nanmax(values):.3g}"
    plot.tip(mesh, method, f"{label}: {words}")
    axes.invert_yaxis()
    axes.set_title(label, fontsize=7, color=MUTED, pad=3)
    axes.spines[:].set_visible(False)
    for axis, names in ((axes.xaxis, table.columns), (axes.yaxis, table.index)):
        ends = sorted({0, len(names) - 1})
        axis.set_ticks([end + 0.5 for end in ends], [f"{names[end]:,g}" for end in ends], fontsize=6)
    axes.tick_params(pad=1.5)


LABEL_PLACES = [
    *((6, 0, "left", "center"), (-6, 0, "right", "center"), (0, 6, "center", "bottom"), (0, -6, "center", "top")),
    *((5, 5, "left", "bottom"), (-5, 5, "right", "bottom"), (5, -5, "left", "top"), (-5, -5, "right", "top")),
    *((0, 13, "center", "bottom"), (0, -13, "center", "top")),
    *((14, 13, "left", "bottom"), (-14, 13, "right", "bottom"), (14, -13, "left", "top"), (-14, -13, "right", "top")),
]
"""Where a name may stand beside its point, in points, the best first."""


def _along(spots: Sequence[Spot], steps: int = 24) -> list[Spot]:
    """Return points on the line through `spots`, so that labels can keep clear of it."""
    return [
        (before[0] + (after[0] - before[0]) * step / steps, before[1] + (after[1] - before[1]) * step / steps)
        for before, after in itertools.pairwise(spots)
        for step in range(steps + 1)
    ]


def _place_labels(axes: Axes, labels: Sequence[tuple[float, float, str, str]], points: Sequence[Spot]) -> None:
    """Label points (x, y, text, color) of axes that are laid out, where they cover least, from left to right.

    Dim ones come last, and only where they touch no other.
    """
    canvas = FigureCanvasAgg(axes.figure)  # type: ignore[arg-type]
    renderer, taken = canvas.get_renderer(), list[Bbox]()
    marks, frame = (
        axes.transData.transform(numpy.array(points, dtype=float).reshape(-1, 2)),
        axes.get_window_extent(renderer),
    )

    def price(box: Bbox) -> float:
        inside = Bbox.intersection(box, frame)
        outside = 1 - (inside.width * inside.height / (box.width * box.height) if inside else 0)
        covered = ((marks > numpy.array(box.min) - 3) & (marks < numpy.array(box.max) + 3)).all(axis=1).sum()
        return 40 * outside + 6 * sum(box.padded(1).overlaps(other) for other in taken) + covered

    for x, y, text, color in sorted(labels, key=lambda each: (each[3] == DIM, each[0])):
        label, found = (
            axes.annotate(text, (x, y), xytext=(0, 0), textcoords="offset points", fontsize=8, color=color),
            [],
        )
        for number, (right, up, horizontal, vertical) in enumerate(LABEL_PLACES[:8] if color == DIM else LABEL_PLACES):
            label.set(position=(right, up), ha=horizontal, va=vertical)
            box = label.get_window_extent(renderer)
            found.append((price(box) + 0.05 * number, number, box))
        cost, number, box = min(found, key=lambda each: each[:2])
        if color == DIM and cost >= 6:
            label.remove()
            continue
        right, up, horizontal, vertical = LABEL_PLACES[number]
        label.set(position=(right, up), ha=horizontal, va=vertical)
        taken.append(box)
