"""Throughput against latency of a benchmark, and decoding speed against bytes of a comparison."""

from __future__ import annotations

import math

from matplotlib.ticker import FuncFormatter

from dmc.results.benchmark import HuggingFaceContestant, Measurement
from dmc.results.report.drawing import DIM, FRONT, FULL, GATES, MUTED, Drawing, drawing
from dmc.results.report.findings import Result
from dmc.results.report.labels import along, place_labels


def draw_speed(number: int, rows: list[Measurement]) -> Drawing:
    """Draw tokens/s against time per token of one benchmark; the points of a line are batch sizes.

    Args:
        number: of the source, as the page counts.
        rows: its measurements.
    """
    names = list(dict.fromkeys(row.name for row in rows))
    colors = dict(zip(names, _colors(names, rows), strict=True))
    title = f"Tokens/s against latency, prompts of {rows[0].prompt_length:,} (source {number})"
    caption = "Up and to the left is better. The numbers are batch sizes."
    with drawing(title, caption, height=3.7) as canvas:
        axes, labels, points = canvas.axes, [], []
        for name in names:
            own = sorted((row for row in rows if row.name == name), key=lambda row: row.batch_size)
            spots = [(1e3 * row.token_seconds, row.tokens_per_second) for row in own]
            points += [*spots, *along(spots)]
            axes.plot(*zip(*spots, strict=True), color=colors[name], linewidth=1.6)
            for row, spot in zip(own, spots, strict=True):
                (mark,) = axes.plot(*spot, marker="o", color=colors[name], markersize=6, markeredgewidth=0)
                words = f"{name}, batch {row.batch_size}: {spot[1]:,.1f} tokens/s, {spot[0]:,.1f} ms/token"
                canvas.tip(mark, name, f"{words}, {row.bytes_allocated:,} cache bytes")
            labels.append((*spots[-1], f"{name} ({own[-1].batch_size})", colors[name]))
            labels += [(*spot, str(row.batch_size), MUTED) for row, spot in zip(own[:-1], spots[:-1], strict=True)]
        axes.margins(0.14)
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.set(xlabel="time per output token (ms)", ylabel="throughput (tokens/s)")
        axes.grid(True)
        place_labels(axes, labels, points)
    return canvas


def _colors(names: list[str], rows: list[Measurement]) -> list[str]:
    """Give the plain contestant and the uncompressed one colours of their own, the most compressed one another."""
    ratio = {row.name: row.ratio for row in rows}
    most = max(names, key=lambda name: ratio[name])
    return [
        GATES if name == HuggingFaceContestant.name else FULL if ratio[name] == 1 else FRONT if name == most else DIM
        for name in names
    ]


def draw_decoding(results: list[Result]) -> Drawing:
    """Draw how fast each cell of a comparison decodes against how fast it reads its prompts, which is its latency."""
    caption = "Of the cells' own batches, measured one after the other on a machine that may have been shared."
    with drawing("Decoding speed against time to read a prompt token", caption, height=3.7) as canvas:
        axes = canvas.axes
        spots = [
            (1e3 / (each.prefill_tokens_per_second or math.nan), each.decode_tokens_per_second or math.nan)
            for each in results
        ]
        fastest = max(results, key=lambda each: each.decode_tokens_per_second or 0)
        colors = [
            FULL if each.is_full else GATES if each.own_gates else FRONT if each is fastest else DIM for each in results
        ]
        labels = {}
        for color, each, spot in sorted(zip(colors, results, spots, strict=True), key=lambda mark: mark[0] != DIM):
            (mark,) = axes.plot(*spot, marker="o", color=color, markersize=5, markeredgewidth=0)
            words = f"{each.title}, {each.task}: {spot[1]:,.1f} tokens/s decoding, {spot[0]:,.3g} ms per prompt token"
            canvas.tip(mark, each.method, words)
            if color != DIM:
                labels[each.title] = (*spot, each.title, color)
        axes.margins(0.12)
        axes.set(xlabel="time to read a prompt token (ms)", ylabel="decoding (tokens/s)")
        axes.grid(True)
        place_labels(axes, list(labels.values()), spots)
    return canvas
