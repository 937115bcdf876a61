"""Every plot of results: figures over tables.

Results are lines of `statistics.summarize`, named by `name_methods`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import pandas
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import LogLocator, NullFormatter

from dmc.results.drawing import DIM, FRONT, FULL, GATES, MUTED, NUMBERS, Plot, log_axis, new_plot
from dmc.results.statistics import pareto_front

OUTLIER = 3.0
"""Points worse than the upper quartile by so many times the middle half's spread are drawn at the edge."""
MOST_NAMES, MOST_COLUMNS, MOST_ROWS, MOST_SHAPES = 8, 3, 8, 700
"""Lines that all have their name; heatmaps across and down; cells beyond which one is pixels."""
TITLE_WIDTH = 32
"""Letters of a line in the title of a small heatmap."""
SAME = 1.01
"""Where the values of heads differ by less, relatively, there is no heatmap."""
Heatmap = tuple[str, str, pandas.DataFrame]
"""Method, its label, numbers over two axes; the first row is the top."""
Course = tuple[str, str, pandas.Series, str]
"""Label, method, values along an axis, color."""


def name_methods(lines: pandas.DataFrame, several: bool) -> pandas.DataFrame:
    """Add `name`, the method with its model if there are several, and `label`, the same with its budget.

    Args:
        lines: of a summary, or of a frame of measurements with the column `asked`.
        several: whether there are several stock models.
    """
    if lines.empty:
        return lines.assign(name=[], label=[])
    policy, is_gates = lines["policy"].mask(lines["is_full"], "full cache"), lines["learned"] & lines["budget"].isna()
    name = policy.mask(lines["learned"] | several, lines["variant"] + " " + policy)
    name = name.mask(is_gates, lines["variant"] + " (learned)")
    return lines.assign(name=name, label=name.mask(~lines["is_full"], name + " at " + lines["asked"]))


def draw_quality(lines: pandas.DataFrame) -> Plot:
    """Draw one task's quality against its bytes per token, or the achieved CR where bytes are unknown."""
    over, measure, of = "bytes_per_token", "bytes", "cache bytes per token"
    if lines[over].isna().any():
        over, measure, of = "achieved_ratio", "achieved CR", "achieved CR"
    lines = lines.reset_index(drop=True)
    front = pareto_front(lines.assign(bytes_per_token=lines[over] if measure == "bytes" else 1 / lines[over]))
    higher = bool(lines["higher_is_better"].iloc[0])
    worse = -lines["value"] if higher else lines["value"]
    limit = worse.quantile(0.75) + OUTLIER * (worse.quantile(0.75) - worse.quantile(0.25))
    outlier = (worse > limit) & (len(lines) > 3) & (limit > worse.min())
    error = lines["value_error"].fillna(0.0)
    low, high = (lines["value"] - error)[~outlier].min(), (lines["value"] + error)[~outlier].max()
    room = 0.09 * (high - low) or max(abs(high) * 0.1, 0.1)
    edge = low - room if higher else high + room
    shown = lines.assign(x=lines[over], y=lines["value"].where(~outlier, edge), outlier=outlier)
    shown["front"] = lines.index.isin(front)
    caption = "Blue: the Pareto front. Orange diamonds: models with learned gates. Dotted: the full cache."
    caption += " Bars: standard errors." if error.any() else ""
    if outlier.any():
        cut = ", ".join(f"{line.label} ({line.value:.4g})" for line in lines[outlier].itertuples())
        caption += f" Outliers, drawn as triangles at the edge: {cut}."
    with new_plot(f"{lines['task'].iloc[0]}: quality against {measure}", caption) as plot:
        axes, better = plot.axes, "higher" if higher else "lower"
        ylabel = f"{lines['metric'].iloc[0]} ({better} is better)"
        axes.set(ylim=(low - room, high + room), ylabel=ylabel, xlabel=of)
        log_axis(axes, lines[over])
        for _, rows in shown[~outlier].groupby("name", sort=False):
            if len(rows) > 1:
                curve = rows.sort_values("x")
                (line,) = axes.plot(curve["x"], curve["y"], color=DIM, linewidth=0.8, alpha=0.6)
                plot.tip(line, rows["method"].iloc[0])
        spots = [(shown["x"][label], shown["y"][label]) for label in front if not outlier[label]]
        axes.plot(*zip(*spots, strict=True), color=FRONT, linewidth=1.6)
        plot.cover(spots)
        plot.cover([*zip(shown["x"], shown["y"], strict=True)], steps=0)
        for line in shown.sort_values(["front", "learned", "is_full"]).itertuples():
            marker = ("v" if higher else "^") if line.outlier else "s" if line.is_full else "D" if line.learned else "o"
            color = _color(line, FRONT if line.front else DIM)
            style: Any = {"color": color, "markersize": 5.5, "markeredgewidth": 0, "clip_on": False, "zorder": 3}
            (mark,) = axes.plot(line.x, line.y, marker, **style)
            plot.tip(mark, line.method, _tooltip(line))
            if line.value_error > 0 and not line.outlier:
                ends = line.value - line.value_error, line.value + line.value_error
                axes.vlines(line.x, *ends, color=color, linewidth=1.0, alpha=0.5)
                plot.cover([(line.x, end) for end in ends], steps=4)
            if line.is_full and not line.outlier:
                axes.axhline(line.value, color=FULL, linewidth=0.9, linestyle=(0, (1, 2.5)))
                plot.cover([(x, line.value) for x in axes.get_xlim()])
            if color != DIM and not line.outlier:
                plot.labels.append((line.x, line.y, line.label, color))
        named = {text for *_, text, _ in plot.labels}
        for name, rows in shown[~outlier].groupby("name", sort=False):
            if not named & {*rows["label"]}:  # a method without a name yet, at its largest cache
                plot.labels.append((*rows.sort_values("x")[["x", "y"]].iloc[-1], str(name), DIM))
    return plot


def _tooltip(line: Any) -> str:
    error = "" if pandas.isna(line.value_error) else f" ± {line.value_error:.2g}"
    text = f"{line.label}: {line.metric} {line.value:.4g}{error}, achieved CR {line.achieved_ratio:.2f}"
    return f"{text}, {line.bytes_per_token:,.0f} bytes/token"


def _color(line: Any, other: str) -> str:
    return FULL if line.is_full else GATES if line.learned else other


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
    x = "time per output token (ms)"
    with new_plot(title, "Up and to the left is better. Labels are batch sizes.") as plot:
        for name, rows in speeds.sort_values("batch").groupby("policy", sort=False):
            spots = list(zip(rows["milliseconds"], rows["tokens_per_second"], strict=True))
            places = rows["batch"].map("{:.0f}".format)
            plot.cover(spots)
            plot.axes.plot(*zip(*spots, strict=True), color=color[name], linewidth=1.6)
            for place, spot in zip(places, spots, strict=True):
                (mark,) = plot.axes.plot(*spot, "o", color=color[name], markersize=5.5, markeredgewidth=0)
                plot.tip(mark, str(name), f"{name}, {place}: {spot[1]:,.1f} tokens/s, {x}: {spot[0]:,.4g}")
                plot.labels.append((*spot, place, MUTED))
            plot.labels[-1] = (*spots[-1], f"{name} ({places.iloc[-1]})", color[name])
        plot.axes.margins(0.14)
        plot.axes.set(xlabel=x, ylabel="throughput (tokens/s)", xlim=(0, None), ylim=(0, None))
    return plot


def draw_places(lines: pandas.DataFrame) -> list[Plot]:
    """Draw a metric of one task by its coordinates.

    By one, a line for each method; by something and the layer, for each method a line for each layer; by two others a
    heatmap for each method, of heads only where they differ.

    Args:
        lines: of a frame of measurements with one `task`, `metric` and `by`, and `name`, `label`.
    """
    task, metric, by = (str(lines[name].iloc[0]) for name in ("task", "metric", "by"))
    if by == "instruction layer head":  # heads of all layers side by side
        heads, by = lines["layer"] * (1 + lines["head"].max()) + lines["head"], "head instruction"
        lines = lines.assign(head=heads)
    names, title = by.split(), f"{task}: {metric.replace('_', ' ')} by {by.replace(' ', ' and ')}"
    groups = [rows for _, rows in lines.groupby("label", sort=False)]
    if len(names) == 1:
        ranked = sorted(groups, key=lambda rows: (bool(rows["learned"].iloc[0]), bool(rows["is_full"].iloc[0])))
        courses = [
            (rows["label"].iloc[0], rows["method"].iloc[0], rows.groupby(by)["value"].mean(), _color(rows.iloc[0], DIM))
            for rows in ranked
        ]
        caption = "Green: the full cache. Orange: models with learned gates. Point at a line to see its method."
        return [_draw_courses(courses, title, caption, by, metric)] if lines[by].nunique() > 1 else []
    if names[1] == "layer":
        caption = "Orange: all layers together. Gray: single layers. Point at a line to see its layer."
        return [
            _draw_courses(_layers(rows), f"{rows['label'].iloc[0]}, {title}", caption, names[0], metric)
            for rows in groups
        ]
    down, across = names if names[0] == "layer" else names[::-1]
    maps, even = list[Heatmap](), []
    for rows in groups:
        first, values = rows.iloc[0], rows.groupby([down, across])["value"].mean().unstack()
        if by != "layer head" or values.max(axis=None) > SAME * values.min(axis=None):
            maps.append((first["method"], first["label"], values))
        elif not first["is_full"]:
            even.append(str(first["name"]))
    along = "heads, layer after layer" if by == "head instruction" else across
    caption = f"Dark: low. Light: high. Horizontal: {along}. Vertical: {down}."
    caption += f" Not drawn, for all heads are alike: {', '.join(dict.fromkeys(even))}." if even else ""
    return list(_draw_heatmaps(title, caption, maps, logarithmic=metric == "compression_ratio")) if maps else []


def _layers(places: pandas.DataFrame) -> list[Course]:
    """Return the course of each layer, and of all."""
    first = places.iloc[0]
    table = places.pivot_table(index=first["by"].split()[0], columns="layer", values="value")
    of_all = 1 / (1 / table).mean(axis=1) if first["metric"] == "compression_ratio" else table.mean(axis=1)
    layers = [(f"layer {layer:.0f}", f"{first['method']}, layer {layer:.0f}", table[layer], DIM) for layer in table]
    return [*layers, ("all", first["method"], of_all, GATES)]


def _draw_courses(courses: Sequence[Course], title: str, caption: str, axis: str, metric: str) -> Plot:
    with new_plot(title, caption, 3.2) as plot:
        for label, method, course, color in courses:
            (line,) = plot.axes.plot(course.index, course, color=color, linewidth=1.0 if color == DIM else 1.6)
            plot.tip(line, method, f"{label}: {metric} {course.iloc[-1]:.4g} at the end")
            spots = list(course.items())
            plot.cover(spots, steps=6)
            if color != DIM or len(courses) <= MOST_NAMES:
                plot.labels.append((*spots[-1], label, color))
        if metric == "segments":
            plot.axes.set_yscale("symlog")  # linear up to 1: some lengths have none
            plot.axes.yaxis.set_major_formatter(NUMBERS)
        begin, end = plot.axes.dataLim.intervalx
        plot.axes.set_xlim(begin - 0.05 * (end - begin), end + 0.4 * (end - begin))
        plot.axes.set(xlabel=axis.replace("_", " "), ylabel=metric.replace("_", " "))
    return plot


def _draw_heatmaps(title: str, caption: str, maps: list[Heatmap], logarithmic: bool) -> Iterator[Plot]:
    """Draw small heatmaps in one scale, in sheets that fit a screen."""
    known = numpy.concatenate([values.to_numpy(dtype=float).ravel() for *_, values in maps])
    low, high = float(numpy.nanmin(known)), float(numpy.nanmax(known))
    norm = LogNorm(min(1.0, low), max(2.0, high)) if logarithmic else Normalize(min(0.0, low), max(1.0, high))
    columns = min(MOST_COLUMNS, len(maps))
    for start in range(0, len(maps), columns * MOST_ROWS):
        sheet = maps[start : start + columns * MOST_ROWS]
        rows = -(-len(sheet) // columns)
        height = 0.75 + (0.93 + 0.06 * min(24, len(sheet[0][-1]))) * rows
        with new_plot(title, caption, height, rows, columns) as plot:
            every = plot.figure.axes
            for axes, (method, label, table) in zip(every, sheet, strict=False):
                values = table.to_numpy(dtype=float)
                mesh = axes.pcolormesh(values, cmap="cividis", norm=norm, edgecolors="face", linewidth=0.2)
                mesh.set_rasterized(values.size > MOST_SHAPES)
                range_of_values = f"mean {numpy.nanmean(values):.3g}, lowest {numpy.nanmin(values):.3g}"
                plot.tip(mesh, method, f"{label}: {range_of_values}, highest {numpy.nanmax(values):.3g}")
                axes.set_title(textwrap.fill(label, TITLE_WIDTH), fontsize=7, color=MUTED, pad=2)
                for axis, names in ((axes.xaxis, table.columns), (axes.yaxis, table.index)):
                    axis.set_ticks([0.5, len(names) - 0.5], [f"{names[end]:,g}" for end in (0, -1)], fontsize=6)
                axes.grid(False)
                axes.invert_yaxis()
                axes.tick_params(pad=1)
            for axes in every[len(sheet) :]:
                axes.remove()
            place: Any = {"location": "top", "fraction": 0.3 / height, "pad": 0.1 / height, "aspect": 50}
            ticks = LogLocator(base=2) if logarithmic else None
            bar: Any = plot.figure.colorbar(mesh, ax=plot.figure.axes, ticks=ticks, **place)
            bar.solids.set(rasterized=False, edgecolor="face")  # shapes, not pixels
            bar.ax.tick_params(labelsize=7)
            bar.ax.xaxis.set_major_formatter(NUMBERS)
            bar.ax.xaxis.set_minor_formatter(NullFormatter())
            bar.outline.set_visible(False)
        yield plot
