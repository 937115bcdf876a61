"""The ratio asked for against the ratio achieved, a line per method."""

from __future__ import annotations

import math

from dmc.results.report.drawing import DIM, FRONT, GATES, INK, MUTED, Drawing, drawing
from dmc.results.report.findings import Result
from dmc.results.report.judgement import HELD, holds_budget
from dmc.results.report.quality_drawing import log_ticks


def draw_requested_ratio(results: list[Result]) -> Drawing:
    """Draw what each method achieved (a dot) of what was asked for (a stroke), over all tasks."""
    asked = [each for each in results if not each.is_full]
    names = sorted({each.name for each in asked}, key=lambda name: _shortfall(name, asked))
    caption = (
        f"Stroke: asked for. Dot: achieved, orange where it is less than {HELD:.0%} of it. Methods that compress "
        "prompts alone grow by what they generate; methods that choose what to read hold everything."
    )
    with drawing("Requested against achieved ratio", caption, height=1.0 + 0.2 * len(names)) as canvas:
        axes = canvas.axes
        for each in asked:
            row = names.index(each.name)
            color = FRONT if holds_budget(each) else GATES
            axes.plot([each.requested_ratio, each.achieved_ratio], [row, row], color=DIM, linewidth=1.2)
            axes.plot(each.requested_ratio, row, marker="|", color=INK, markersize=9, markeredgewidth=1.6)
            (mark,) = axes.plot(each.achieved_ratio, row, marker="o", color=color, markersize=5, markeredgewidth=0)
            words = f"{each.title}, {each.task}: {each.achieved_ratio:.2f} achieved of {each.requested_ratio:.2f}"
            canvas.tip(mark, each.method, words)
        axes.set_yticks(range(len(names)), names, color=MUTED)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xscale("log", base=2)
        ratios = [ratio for each in asked for ratio in (each.requested_ratio, each.achieved_ratio)]
        first, last = math.log2(min(ratios)) - 0.15, math.log2(max(ratios)) + 0.15
        axes.set_xlim(2**first, 2**last)
        log_ticks(axes, first, last)
        axes.set_xlabel("compression ratio")
        axes.grid(True, axis="x")
    return canvas


def _shortfall(name: str, results: list[Result]) -> tuple[float, str]:
    return max(each.requested_ratio / each.achieved_ratio for each in results if each.name == name), name
