"""What gates merge and policies leave: courses over a text or a training run, and the lengths of segments."""

from __future__ import annotations

from matplotlib.ticker import FuncFormatter, MaxNLocator

from dmc.results.report.drawing import DIM, FRONT, GATES, Drawing, drawing
from dmc.results.report.findings import Inside, Profile, Segments


def draw_profile(inside: Inside, profile: Profile) -> Drawing:
    """Draw a thin line for each layer and a thick one for all."""
    caption = "Orange: all layers. Grey: each layer. Point at a line to see which it is."
    with drawing(f"{inside.name}: {profile.measure} by {profile.axis}", caption, height=3.2) as canvas:
        axes = canvas.axes
        for layer, values in enumerate(profile.of_layers):
            (line,) = axes.plot(profile.places, values, color=DIM, linewidth=0.9)
            canvas.tip(line, f"{inside.name}, layer {layer}", f"layer {layer}: {values[-1]:.3g} at the end")
        (line,) = axes.plot(profile.places, profile.of_all, color=GATES, linewidth=2.2)
        canvas.tip(line, inside.name, f"{inside.name}, all layers: {profile.of_all[-1]:.3g} at the end")
        axes.set(xlabel=profile.axis, ylabel=profile.measure)
        axes.grid(True)
    return canvas


def draw_segments(inside: Inside, segments: Segments) -> Drawing:
    """Draw how many segments of the cache have each length."""
    caption = "A segment is a token that is kept and those merged into it, or dropped behind it; all layers and heads."
    with drawing(f"{inside.name}: lengths of segments", caption, height=3.2) as canvas:
        axes = canvas.axes
        edges = [length - 0.5 for length in (*segments.lengths, segments.lengths[-1] + 1)]
        steps = axes.stairs(segments.counts, edges, baseline=0.5, fill=True, color=FRONT)
        canvas.tip(steps, inside.name, f"{sum(segments.counts):,} segments, {segments.mean:.2f} tokens each on average")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.set_ylim(bottom=0.7)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="tokens of a segment", ylabel="segments")
        axes.grid(True, axis="y")
    return canvas
