"""Latency against throughput, one line per contestant, one point per batch size (Figure 5 of the DMC paper)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def plot_pareto(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw measurements as a PNG.

    Args:
        rows: `Measurement`s as dicts; others are left out.
        path: file to write.
    """
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    points = [row for row in rows if "token_seconds" in row]
    for name in dict.fromkeys(row["name"] for row in points):
        own = sorted((row for row in points if row["name"] == name), key=lambda row: row["batch_size"])
        latency, throughput = [1e3 * row["token_seconds"] for row in own], [row["tokens_per_second"] for row in own]
        axes.plot(latency, throughput, marker="o", label=name)
        for row, x, y in zip(own, latency, throughput, strict=True):
            axes.annotate(str(row["batch_size"]), (x, y), textcoords="offset points", xytext=(4, 4), fontsize=8)
    axes.set_xlabel("time per output token (ms)")
    axes.set_ylabel("throughput (tokens/s)")
    axes.set_title("Decoding: the numbers are batch sizes")
    axes.grid(alpha=0.3)
    if points:
        axes.legend()
    figure.savefig(path, dpi=150)
