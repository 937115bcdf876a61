"""A picture of the compression ratio of every layer and KV head."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from torch import Tensor


def draw_ratio_heatmap(ratios: Tensor, path: Path, title: str) -> None:
    """Draw compression ratios [L, H] as a PNG (the paper's Figure 6)."""
    num_layers, num_heads = ratios.shape
    figure = Figure(figsize=(max(3.0, 0.45 * num_heads + 1.8), max(2.6, 0.32 * num_layers + 1.4)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(ratios.numpy(), aspect="auto", cmap="viridis", vmin=1.0)
    axes.set(title=title, xlabel="KV head", ylabel="layer")
    axes.set_xticks(range(0, num_heads, max(1, num_heads // 8)))
    axes.set_yticks(range(0, num_layers, max(1, num_layers // 16)))
    if num_layers * num_heads <= 128:
        middle = float(ratios.max() + 1) / 2
        for layer in range(num_layers):
            for head in range(num_heads):
                ratio = float(ratios[layer, head])
                axes.text(head, layer, f"{ratio:.1f}", ha="center", va="center", color="w" if ratio < middle else "k")
    figure.colorbar(image, label="compression ratio")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
