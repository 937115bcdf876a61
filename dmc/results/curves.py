"""The curves of a training run from its logs, as a picture: loss and compression ratio by step."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib
import pandas
from matplotlib.figure import Figure

from dmc.results.drawing import GATES, INK, MUTED, SETTINGS, WIDTH

STYLES = {
    "training": {"color": MUTED, "linewidth": 0.9},
    "validation": {"color": GATES, "linewidth": 1.6, "marker": "o", "markersize": 3},
    "target": {"color": INK, "linewidth": 0.9, "linestyle": "--"},
}


def read_log(run: Path) -> pandas.DataFrame:
    """Read the log of a run by step; of a step that several starts took, or wrote in parts, the last value counts."""
    paths = sorted(run.glob("logs/version_*/metrics.csv"), key=lambda path: int(path.parent.name.rpartition("_")[2]))
    parts = [pandas.read_csv(path) for path in paths if path.stat().st_size]
    return pandas.concat(parts).groupby("step").last() if parts else pandas.DataFrame()


def draw_curves(log: pandas.DataFrame, ratio: str) -> bytes:
    """Draw a log as a PNG.

    Args:
        log: of `read_log`.
        ratio: the compression ratio that the run's target counts, `achieved_ratio` or `decided_ratio`.
    """
    shown = {
        "loss (nats per token)": {"train/loss": "training", "validation/loss": "validation"},
        f"compression ratio ({ratio})": {
            "train/target_ratio": "target", f"train/{ratio}": "training", f"validation/{ratio}": "validation",
        },
    }  # fmt: skip
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(2 * WIDTH, 3.2), layout="constrained")
        for axes, (title, curves) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
            for name, label in curves.items():
                if name in log:
                    axes.plot(log[name].dropna(), label=label, **STYLES[label])
            axes.grid(True)
            axes.set(xlabel="step", ylabel=title)
            if axes.lines:
                axes.legend(frameon=False, fontsize=8)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=110, facecolor="white")
    return file.getvalue()
