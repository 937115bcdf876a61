"""One drawing as SVG for the page, whose colours follow light and dark, and as PNG."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, LINE, DIM = "#1c2433", "#5a6577", "#dfe3ea", "#aab3c1"
FRONT, GATES, FULL = "#0067b4", "#c4500c", "#16805f"
COLORS = {"ink": INK, "muted": MUTED, "line": LINE, "dim": DIM, "front": FRONT, "gates": GATES, "full": FULL}
"""CSS variables of `page.css` and their values in a PNG; the hues stay apart for colour-blind readers."""
WIDTH = 5.0
"""Inches; two stand side by side on a wide page."""
SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dmc",
    "text.parse_math": False,  # names come from users and may hold dollars
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
}


@dataclass
class Drawing:
    """A plot, with what its marks say when they are pointed at."""

    title: str
    caption: str
    figure: Figure
    panels: list[Axes]
    tips: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By mark: the method, so that all marks of one method light up together, and the words."""
    svg: str = ""
    png: bytes = b""
    file_name: str = ""

    @property
    def axes(self) -> Axes:
        """The first panel."""
        return self.panels[0]

    def tip(self, artist: Artist, method: str, text: str = "") -> None:
        """Let a mark say something."""
        name = f"mark{len(self.tips)}"
        artist.set_gid(name)
        self.tips[name] = (method, text)

    def finish(self, number: int) -> Drawing:
        """Render it; `number` keeps the ids of a page's drawings apart."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")[:60]
        self.file_name = f"{number:02d}-{slug}.png"
        with matplotlib.rc_context(SETTINGS):
            self.figure.draw_without_rendering()
            self.figure.set_layout_engine("none")  # it has done its work, and would do it again at every save
            picture, vector = io.BytesIO(), io.StringIO()
            self.figure.savefig(picture, format="png", dpi=160, facecolor="white")
            self.figure.savefig(vector, format="svg", transparent=True, metadata={"Date": None})
        self.png, self.svg = picture.getvalue(), self._inline(vector.getvalue(), f"f{number}-")
        return self

    def _inline(self, svg: str, prefix: str) -> str:
        svg = svg[svg.index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.S)
        svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', self._head, svg, count=1, flags=re.S)
        for name, color in COLORS.items():
            svg = svg.replace(color, f"var(--{name})")
        for name, (method, text) in self.tips.items():
            method, text = html.escape(method), html.escape(text)
            focus = f' data-tip="{text}" tabindex="0" role="img" aria-label="{text}"' if text else ""
            svg = svg.replace(f'<g id="{name}">', f'<g id="{name}" class="mark" data-method="{method}"{focus}>')
        svg = re.sub(r'(\sid="|url\(#|href="#)', rf"\1{prefix}", svg)
        return re.sub(r"\n\s*", "\n", svg)

    def _head(self, found: re.Match[str]) -> str:
        label = html.escape(f"{self.title}. {self.caption}")
        return f'<svg viewBox="{found[1]}" role="group" aria-label="{label}">'


@contextmanager
def drawing(title: str, caption: str, height: float, shape: tuple[int, int] = (1, 1)) -> Iterator[Drawing]:
    """Open an empty plot in the report's style, of panels in rows and columns."""
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        yield Drawing(title, caption, figure, list(figure.subplots(*shape, squeeze=False).flatten()))
