"""Every drawing of a report, by section."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

from tqdm import tqdm

from dmc.results.report.curve_drawing import draw_curves
from dmc.results.report.drawing import Drawing
from dmc.results.report.findings import Findings, Heatmap
from dmc.results.report.heatmap_drawing import draw_head_ratios, draw_needles
from dmc.results.report.inside_drawing import draw_profile, draw_segments
from dmc.results.report.place_rows import ratio_heatmap
from dmc.results.report.quality_drawing import draw_quality_over_bytes, draw_quality_over_ratio
from dmc.results.report.ratio_drawing import draw_requested_ratio
from dmc.results.report.speed_drawing import draw_decoding, draw_speed

QUALITY, COSTS = "Quality against memory", "Budgets held, and speed"
CURVES, NEEDLES, HEADS = "By position, turn or length", "Needles by length and depth", "Compression of layers and heads"
INSIDE = "What gates merge and policies leave"


def draw_all(findings: Findings) -> dict[str, list[Drawing]]:
    """Draw whatever the rows hold; sections without a drawing are left out."""
    planned: list[tuple[str, Callable[[], Drawing | list[Drawing]]]] = []
    for task, results in findings.tasks.items():
        planned.append((QUALITY, partial(draw_quality_over_bytes, task, results)))
        planned.append((QUALITY, partial(draw_quality_over_ratio, task, results)))
    if any(not result.is_full for result in findings.results):
        planned.append((COSTS, partial(draw_requested_ratio, findings.results)))
    for source in dict.fromkeys(speed.source for speed in findings.speeds):
        rows = [speed.measurement for speed in findings.speeds if speed.source == source]
        planned.append((COSTS, partial(draw_speed, source + 1, rows)))
    timed = [result for result in findings.results if result.decode_tokens_per_second]
    if timed:
        planned.append((COSTS, partial(draw_decoding, timed)))
    for place in dict.fromkeys((curve.task, curve.axis) for curve in findings.curves):
        curves = [curve for curve in findings.curves if (curve.task, curve.axis) == place]
        planned.append((CURVES, partial(draw_curves, curves)))
    planned += [(NEEDLES, partial(draw_needles, heatmaps)) for heatmaps in _by_task(findings.needles)]
    planned += [(HEADS, partial(draw_head_ratios, heatmaps)) for heatmaps in _by_task(findings.head_ratios)]
    for inside in findings.insides:
        names = (inside.name, inside.name, f"CR {inside.ratio:.2f}", f"{inside.name}, {inside.text or 'last step'}")
        planned.append((INSIDE, partial(draw_head_ratios, [ratio_heatmap(*names, inside.ratios)])))
        planned += [(INSIDE, partial(draw_profile, inside, profile)) for profile in inside.profiles]
        if inside.segments is not None:
            planned.append((INSIDE, partial(draw_segments, inside, inside.segments)))
    sections: dict[str, list[Drawing]] = {}
    number = itertools.count(1)
    for section, draw in tqdm(planned, "drawings", disable=None):
        drawn = draw()
        drawn = drawn if isinstance(drawn, list) else [drawn]
        sections.setdefault(section, []).extend(each.finish(next(number)) for each in drawn)
    return sections


def _by_task(heatmaps: list[Heatmap]) -> list[list[Heatmap]]:
    tasks = dict.fromkeys(each.task for each in heatmaps)
    return [[each for each in heatmaps if each.task == task] for task in tasks]
