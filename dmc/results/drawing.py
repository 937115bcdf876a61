"""What every plot has: colors that follow light and dark, tooltips for marks, names beside points; as SVG and as PNG.

Blue is what no other point beats, orange a model with learned gates, green the full cache.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator, Sequence
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
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

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
"""Inches of a figure; two stand side by side on a wide page."""
LABEL_PLACES = numpy.array(
    [(6, 0), (-6, 0), (0, 6), (0, -6), (5, 5), (-5, 5), (5, -5), (-5, -5), (0, 13), (0, -13), (14, 13), (-14, 13),
     (14, -13), (-14, -13)]
)  # fmt: skip
"""Where a name may stand beside its point, in points, the best first; dim ones at the first eight alone."""
NUMBERS = FuncFormatter(lambda value, _: f"{value:,g}")
Spot = tuple[float, float]


@dataclass
class Plot:
    """A figure with a tooltip for each mark."""

    title: str
    caption: str
    figure: Figure
    axes: Axes
    tips: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Method and tooltip by mark; the marks of one method are highlighted together."""
    labels: list[tuple[float, float, str, str]] = field(default_factory=list)
    """Points to be named: x, y, text, color."""
    covered: list[Spot] = field(default_factory=list)
    """Points that labels keep clear of."""

    def tip(self, artist: Artist, method: str, text: str = "") -> None:
        """Give a mark a method and a tooltip."""
        artist.set_gid(f"mark{len(self.tips)}")
        self.tips[f"mark{len(self.tips)}"] = method, text

    def cover(self, spots: Sequence[Spot], steps: int = 24) -> None:
        """Keep labels clear of the line through `spots`."""
        self.covered += spots
        shares = numpy.linspace(0, 1, steps + 1)[:, None]
        for before, after in itertools.pairwise(numpy.asarray(spots, dtype=float)):
            self.covered += [*map(tuple, before + (after - before) * shares)]

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
                attributes = {"data-tip": text, "tabindex": "0", "role": "img"} if text else {}
                _describe(group, text, **{"class": "mark", "data-method": method}, **attributes)
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
def new_plot(title: str, caption: str, height: float = 3.7, rows: int = 1, columns: int = 1) -> Iterator[Plot]:
    """Open an empty figure; at the end it is laid out once, and the points of its first axes are named."""
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        figure.subplots(rows, columns)
        plot = Plot(title, caption, figure, figure.axes[0])
        plot.axes.grid(True)
        plot.axes.xaxis.set_major_formatter(NUMBERS)
        plot.axes.yaxis.set_major_formatter(NUMBERS)
        yield plot
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # it has done its work, and would do it again at every save
        _place_labels(plot)


def _place_labels(plot: Plot) -> None:
    """Name points where the labels cover least, from left to right; dim ones last, and only where they touch none."""
    renderer, axes = FigureCanvasAgg(plot.figure).get_renderer(), plot.axes
    frame, occupied = axes.get_window_extent(renderer), list[tuple[Any, Any]]()
    marks = axes.transData.transform(numpy.array(plot.covered, dtype=float).reshape(-1, 2))
    for x, y, text, color in sorted(plot.labels, key=lambda label: (label[3] == DIM, label[0])):
        label = axes.annotate(text, (x, y), (0, 0), textcoords="offset points", fontsize=8, color=color, va="bottom")
        size, spot = numpy.array(label.get_window_extent(renderer).size), axes.transData.transform((x, y))
        places = LABEL_PLACES[:8] if color == DIM else LABEL_PLACES
        low = spot + places * plot.figure.dpi / 72 + size * (numpy.sign(places) - 1) / 2  # [places, 2]
        high = low + size
        inside = (numpy.minimum(high, frame.max) - numpy.maximum(low, frame.min)).clip(0).prod(1) / size.prod()
        cost = 40 * (1 - inside) + 0.05 * numpy.arange(len(places))
        cost += sum(6.0 * ((low - 1 < end) & (high + 1 > begin)).all(1) for begin, end in occupied)
        cost += ((marks > low[:, None] - 3) & (marks < high[:, None] + 3)).all(2).sum(1)
        best = cost.argmin()
        if color == DIM and cost[best] >= 6:
            label.remove()
            continue
        label.set_position(tuple((low[best] - spot) * 72 / plot.figure.dpi))
        occupied.append((low[best], high[best]))


def log_axis(axes: Axes, values: Sequence[float] | pandas.Series) -> None:
    """Make x logarithmic around values, with room at both ends and ticks at powers of 2."""
    low, high = math.log2(min(values)), math.log2(max(values))
    room = max(0.12, 0.08 * (high - low))
    axes.set_xscale("log", base=2)
    axes.set_xlim(2 ** (low - room), 2 ** (high + room))
    axes.xaxis.set_major_locator(LogLocator(2, subs=(1.0,) if high - low > 1.8 else (1.0, 2**0.5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if abs(value) >= 10 else f"{value:.2g}")
