"""Quality against bytes, and against the ratio achieved: the front in colour, everything else in grey."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from dmc.results.report.drawing import DIM, FRONT, FULL, GATES, Drawing, drawing
from dmc.results.report.findings import Result
from dmc.results.report.judgement import badness, pareto_front
from dmc.results.report.labels import along, place_labels

FAR = 3.0
"""Points worse than the upper quartile by so many times the middle half's spread are drawn at the edge."""


def draw_quality_over_bytes(task: str, results: list[Result]) -> Drawing:
    """Draw a task's quality against the allocated bytes per token."""
    return _draw(f"{task}: quality against bytes", "cache bytes per token", results, lambda each: each.bytes_per_token)


def draw_quality_over_ratio(task: str, results: list[Result]) -> Drawing:
    """Draw a task's quality against the ratio achieved."""
    title = f"{task}: quality against achieved CR"
    return _draw(title, "achieved CR (tokens over entries held)", results, lambda each: each.achieved_ratio, sign=-1)


@dataclass
class _Panel:
    """What the parts of one drawing share."""

    canvas: Drawing
    results: list[Result]
    front: list[Result]
    far: list[Result]
    place: Callable[[Result], float]

    def spot(self, result: Result) -> tuple[float, float]:
        """Return where a result is drawn: far ones at the edge."""
        edge = self.canvas.axes.get_ylim()[0 if result.higher_is_better else 1]
        return self.place(result), edge if result in self.far else result.quality


def _draw(title: str, axis: str, results: list[Result], place: Callable[[Result], float], sign: int = 1) -> Drawing:
    front, limit, first = pareto_front(results, lambda each: sign * place(each)), _limit(results), results[0]
    far = [each for each in results if limit is not None and badness(each) > limit]
    words = "Blue: the front, which no other point beats in both."
    words += " Diamonds: models with gates of their own." if any(each.own_gates for each in results) else ""
    words += " Dotted: full cache." if any(each.is_full for each in results) else ""
    if far:
        cut = ", ".join(f"{each.title} ({each.quality:.4g})" for each in far)
        words += f" Far outside, triangles at the edge: {cut}."
    with drawing(title, words, height=3.7) as canvas:
        panel = _Panel(canvas, results, front, far, place)
        _set_limits(canvas.axes, [each for each in results if each not in far], results, place)
        better = "higher" if first.higher_is_better else "lower"
        canvas.axes.set(xlabel=axis, ylabel=f"{first.metric} ({better} is better)")
        canvas.axes.grid(True)
        _draw_lines(panel)
        _draw_points(panel)
        _draw_labels(panel)
    return canvas


def _draw_lines(panel: _Panel) -> None:
    axes = panel.canvas.axes
    for name in dict.fromkeys(each.name for each in panel.results):
        own = [each for each in panel.results if each.name == name and each not in panel.far]
        if len(own) > 1:
            spots = [panel.spot(each) for each in sorted(own, key=panel.place)]
            (line,) = axes.plot(*zip(*spots, strict=True), color=DIM, linewidth=0.8, alpha=0.6)
            panel.canvas.tip(line, own[0].method)
    front = [panel.spot(each) for each in panel.front if each not in panel.far]
    axes.plot(*zip(*front, strict=True), color=FRONT, linewidth=1.6)
    for each in panel.results:
        if each.is_full and each not in panel.far:
            axes.axhline(each.quality, color=FULL, linewidth=0.9, linestyle=(0, (1, 2.5)))


def _draw_points(panel: _Panel) -> None:
    for each in sorted(panel.results, key=lambda each: (each in panel.front, each.own_gates, each.is_full)):
        marker = "s" if each.is_full else "D" if each.own_gates else "o"
        if each in panel.far:
            marker = "v" if each.higher_is_better else "^"
        (mark,) = panel.canvas.axes.plot(
            *panel.spot(each), marker=marker, color=_color(each, panel.front), linestyle="none",
            markersize=5.5, markeredgewidth=0, clip_on=False,
        )  # fmt: skip
        panel.canvas.tip(mark, each.method, describe(each))


def _draw_labels(panel: _Panel) -> None:
    axes, near = panel.canvas.axes, [each for each in panel.results if each not in panel.far]
    named = [each for each in panel.front if each in near]
    line = along([panel.spot(each) for each in named])
    line += [spot for each in near if each.is_full for spot in along([(x, each.quality) for x in axes.get_xlim()])]
    named += [each for each in near if (each.own_gates or each.is_full) and each not in named]
    labels = [(*panel.spot(each), each.title, _color(each, panel.front)) for each in named]
    place_labels(axes, labels, [*map(panel.spot, panel.results), *line])


def describe(result: Result) -> str:
    """Write a result on one line, as a point says it."""
    text = f"{result.title}: {result.metric} {result.quality:.4g}"
    if result.quality_error is not None:
        text += f" ± {result.quality_error:.2g}"
    return f"{text}, achieved CR {result.achieved_ratio:.2f}, {result.bytes_per_token:,.0f} bytes/token"


def _color(result: Result, front: list[Result]) -> str:
    return FULL if result.is_full else GATES if result.own_gates else FRONT if result in front else DIM


def _limit(results: list[Result]) -> float | None:
    """Return the badness beyond which a point is far from all others; None if there is none."""
    values = sorted(badness(each) for each in results)
    if len(values) < 4:
        return None
    low, _, high = statistics.quantiles(values, n=4)
    limit = high + FAR * (high - low)
    return limit if values[0] < limit < values[-1] else None


def _set_limits(axes: Axes, near: list[Result], results: list[Result], place: Callable[[Result], float]) -> None:
    qualities, places = [each.quality for each in near], [place(each) for each in results]
    low, high = min(qualities), max(qualities)
    room = 0.09 * (high - low) or max(abs(high) * 0.1, 0.1)
    axes.set_ylim(low - room, high + room)
    axes.set_xscale("log", base=2)
    first, last = math.log2(min(places)), math.log2(max(places))
    margin = max(0.12, 0.08 * (last - first))
    axes.set_xlim(2 ** (first - margin), 2 ** (last + margin))
    log_ticks(axes, first - margin, last + margin)


def log_ticks(axes: Axes, first: float, last: float) -> None:
    """Write the powers of 2, and what lies halfway where there are few; `first` and `last` are logarithms."""
    step = 1 if last - first > 2 else 2
    ticks = [2 ** (place / step) for place in range(math.ceil(first * step), math.floor(last * step) + 1)]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}" if size >= 10 else f"{size:.2g}"))
