"""Write names beside points so that they cover neither points nor each other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.transforms import Bbox

PLACES = [
    *((6, 0, "left", "center"), (-6, 0, "right", "center"), (0, 6, "center", "bottom"), (0, -6, "center", "top")),
    *((5, 5, "left", "bottom"), (-5, 5, "right", "bottom"), (5, -5, "left", "top"), (-5, -5, "right", "top")),
    *((0, 13, "center", "bottom"), (0, -13, "center", "top")),
    *((14, 13, "left", "bottom"), (-14, 13, "right", "bottom"), (14, -13, "left", "top"), (-14, -13, "right", "top")),
]


Spot = tuple[float, float]


def along(spots: Sequence[Spot], steps: int = 24) -> list[Spot]:
    """Return points on the line through `spots`, so that labels can keep clear of it."""
    return [
        (before[0] + (after[0] - before[0]) * step / steps, before[1] + (after[1] - before[1]) * step / steps)
        for before, after in itertools.pairwise(spots)
        for step in range(steps + 1)
    ]


def place_labels(axes: Axes, labels: Sequence[tuple[float, float, str, str]], points: Sequence[Spot]) -> None:
    """Label points, each where it overlaps least.

    Args:
        axes: with final limits.
        labels: x, y, text and colour of each, in data units; the first choose first.
        points: all that should stay visible, in data units.
    """
    canvas = FigureCanvasAgg(axes.figure)  # type: ignore[arg-type]
    canvas.draw()
    renderer = canvas.get_renderer()
    marks = axes.transData.transform(np.array(points, dtype=float).reshape(-1, 2))
    taken: list[Bbox] = []
    frame = axes.get_window_extent(renderer)
    for x, y, text, color in labels:
        best: tuple[float, int, Bbox] | None = None
        label = axes.annotate(text, (x, y), xytext=(0, 0), textcoords="offset points", fontsize=8, color=color)
        for number, (right, up, horizontal, vertical) in enumerate(PLACES):
            label.set(position=(right, up), ha=horizontal, va=vertical)
            box = label.get_window_extent(renderer)
            inside = Bbox.intersection(box, frame)
            outside = 1 - (inside.width * inside.height / (box.width * box.height) if inside else 0)
            covered = ((marks > np.array(box.min) - 3) & (marks < np.array(box.max) + 3)).all(axis=1).sum()
            clashes = sum(box.padded(1).overlaps(other) for other in taken)
            price = 8 * outside + 6 * clashes + covered + 0.05 * number
            if best is None or price < best[0]:
                best = price, number, box
        assert best is not None
        right, up, horizontal, vertical = PLACES[best[1]]
        label.set(position=(right, up), ha=horizontal, va=vertical)
        taken.append(best[2])
