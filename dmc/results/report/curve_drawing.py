"""A metric over the places of a task, a line per method and budget."""

from __future__ import annotations

import math

from dmc.results.report.drawing import DIM, FULL, GATES, Drawing, drawing
from dmc.results.report.findings import Curve
from dmc.results.report.labels import along, place_labels

MOST_NAMES = 8
NAMES_SHARE = 0.5
"""Room for names behind the ends of lines, over the length of the axis."""


def draw_curves(curves: list[Curve]) -> Drawing:
    """Draw the curves of one task over one axis."""
    first = curves[0]
    caption = "Green: full cache. Orange: models with gates of their own. Point at a line to see whose it is."
    with drawing(f"{first.task}: {first.metric} by {first.axis}", caption, height=3.7) as canvas:
        axes, labels, points = canvas.axes, [], []
        for curve in sorted(curves, key=lambda each: (each.own_gates, each.is_full)):
            color = FULL if curve.is_full else GATES if curve.own_gates else DIM
            values = [math.nan if value is None else value for value in curve.values]
            (line,) = axes.plot(curve.places, values, color=color, linewidth=1.6 if color != DIM else 1.0)
            canvas.tip(line, curve.method, f"{curve.title}: {curve.metric} {_last(curve):.4g} at the end")
            points += along(list(zip(curve.places, values, strict=True)), steps=6)
            if color != DIM or len(curves) <= MOST_NAMES:
                labels.append((curve.places[-1], _last(curve), curve.title, color))
        axes.set(xlabel=first.axis, ylabel=first.metric)
        begin, end = axes.dataLim.intervalx
        axes.set_xlim(begin - 0.05 * (end - begin), end + NAMES_SHARE * (end - begin))
        axes.grid(True)
        place_labels(axes, labels, points)
    return canvas


def _last(curve: Curve) -> float:
    return next((value for value in reversed(curve.values) if value is not None), math.nan)
