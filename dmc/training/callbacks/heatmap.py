"""Layers and KV heads along a run: their ratios as data and as pictures, and what compressing each costs."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

RATIOS_NAME = "ratios.jsonl"
"""One line per validation: the step, and the share of its tokens each head holds, layer by layer."""
MOST_NUMBERS = 128
"""Cells up to which each has its value written into it."""


class RatioHistory:
    """Lines of a file that outlives restarts: a step validated again counts as the later line says.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, held: Tensor) -> None:
        """Add the shares held after a step, [L, H]."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"step": step, "held": held.tolist()}) + "\n"
        with self.path.open("ab", buffering=0) as file:  # in one piece, whenever the run is killed
            file.write(line.encode())

    def read(self) -> tuple[list[int], Tensor]:
        """Return the steps in order and the shares held after each, [S, L, H]."""
        held: dict[int, Tensor] = {}
        for line in self.path.read_text().splitlines():
            row = json.loads(line)
            held[row["step"]] = torch.tensor(row["held"])
        steps = sorted(held)
        return steps, torch.stack([held[step] for step in steps])


def draw_ratio_heatmap(ratios: Tensor, path: Path, title: str) -> None:
    """Draw compression ratios [L, H] as a PNG (the paper's Figure 6)."""
    _draw_heads(ratios, path, title, "compression ratio", lowest=1.0)


def draw_cost_heatmap(costs: Tensor, path: Path) -> None:
    """Draw what compressing each head alone costs, [L, H] in nats per token, as a PNG."""
    _draw_heads(1000 * costs, path, "cost of compressing one head", "nats per 1,000 tokens", lowest=0.0)


def _draw_heads(values: Tensor, path: Path, title: str, label: str, lowest: float) -> None:
    figure, axes = _draw(values, label, lowest)
    axes.set(title=title, xlabel="KV head")
    num_heads = values.shape[1]
    axes.set_xticks(range(0, num_heads, max(1, num_heads // 8)))
    _save(figure, path)


def draw_ratio_evolution(steps: list[int], held: Tensor, path: Path) -> None:
    """Draw the compression ratio of each layer at each validation as a PNG (the paper's Figure 7).

    Args:
        steps: of the validations, S of them.
        held: share of its tokens that each head held, [S, L, H].
        path: the picture.
    """
    figure, axes = _draw(1 / held.mean(-1).T)
    axes.set(title="CR of each layer", xlabel="training step")
    places = range(0, len(steps), max(1, len(steps) // 8))
    axes.set_xticks(places, [str(steps[place]) for place in places])
    _save(figure, path)


def _draw(values: Tensor, label: str = "compression ratio", lowest: float = 1.0) -> tuple[Figure, Axes]:
    """Draw values [L, columns], which are at least `lowest`."""
    num_layers, num_columns = values.shape
    size = min(24.0, max(3.0, 0.45 * num_columns + 1.8)), max(2.6, 0.32 * num_layers + 1.4)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values.numpy(), aspect="auto", cmap="viridis", vmin=lowest)
    axes.set_ylabel("layer")
    axes.set_yticks(range(0, num_layers, max(1, num_layers // 16)))
    if values.numel() <= MOST_NUMBERS:
        middle = float(values.max() + lowest) / 2
        for layer in range(num_layers):
            for column in range(num_columns):
                value = float(values[layer, column])
                color = "w" if value < middle else "k"
                axes.text(column, layer, f"{value:.1f}", ha="center", va="center", color=color)
    figure.colorbar(image, label=label)
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
