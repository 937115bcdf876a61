"""Pictures of compression ratios: of every layer and KV head at a step, and of every layer along a run."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

MOST_NUMBERS = 128
"""Cells up to which each has its ratio written into it."""


def draw_ratio_heatmap(ratios: Tensor, path: Path, title: str) -> None:
    """Draw compression ratios [L, H] as a PNG (the paper's Figure 6)."""
    figure, axes = _draw(ratios)
    axes.set(title=title, xlabel="KV head")
    num_heads = ratios.shape[1]
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


def _draw(ratios: Tensor) -> tuple[Figure, Axes]:
    """Draw ratios [L, columns]."""
    num_layers, num_columns = ratios.shape
    size = min(24.0, max(3.0, 0.45 * num_columns + 1.8)), max(2.6, 0.32 * num_layers + 1.4)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(ratios.numpy(), aspect="auto", cmap="viridis", vmin=1.0)
    axes.set_ylabel("layer")
    axes.set_yticks(range(0, num_layers, max(1, num_layers // 16)))
    if ratios.numel() <= MOST_NUMBERS:
        middle = float(ratios.max() + 1) / 2
        for layer in range(num_layers):
            for column in range(num_columns):
                ratio = float(ratios[layer, column])
                color = "w" if ratio < middle else "k"
                axes.text(column, layer, f"{ratio:.1f}", ha="center", va="center", color=color)
    figure.colorbar(image, label="compression ratio")
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
