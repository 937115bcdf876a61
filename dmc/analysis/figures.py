"""Figures as files: a PNG and the numbers in it as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from dmc.training.callbacks.heatmap import draw_entry_heatmap, draw_ratio_evolution, draw_ratio_heatmap


class Figures:
    """Writes figures into a folder, which is made with the first.

    Args:
        folder: where to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths: list[Path] = []
        """What has been written."""

    def path(self, name: str) -> Path:
        """Return where a file goes, and count it as written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.paths.append(self.folder / name)
        return self.paths[-1]

    def table(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Write a CSV file."""
        with self.path(name).open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows(rows)

    def ratio_by_head(self, ratios: Tensor) -> None:
        """Compression ratio of each layer and KV head, [L, H]."""
        title = f"CR {1 / float((1 / ratios).mean()):.2f}"
        draw_ratio_heatmap(ratios, self.path("ratio_by_head.png"), title)
        self.table("ratio_by_head.csv", ["layer", "head", "ratio"], _cells(ratios))

    def entries_by_head(self, entries: Tensor) -> None:
        """Entries that each layer and KV head holds, [L, H]."""
        draw_entry_heatmap(entries, self.path("entries_by_head.png"), "entries held")
        self.table("entries_by_head.csv", ["layer", "head", "entries"], _cells(entries))

    def ratio_over_length(self, lengths: Sequence[int], ratios: Tensor) -> None:
        """Compression ratio of each layer, [S, L], after `lengths` tokens, S of them."""
        mean = 1 / (1 / ratios).mean(1)
        figure, axes = _panel("tokens", "compression ratio")
        _draw_layers(axes, lengths, ratios, mean)
        self._save(figure, "ratio_over_length.png")
        rows = [[length, *_numbers(row, mean[i])] for i, (length, row) in enumerate(zip(lengths, ratios, strict=True))]
        self.table("ratio_over_length.csv", ["tokens", *_layer_names(ratios.shape[1])], rows)

    def decision_over_position(self, shares: Tensor) -> None:
        """Share of tokens that are merged or dropped at each position, [L, T]; drawn as the mean of neighbours."""
        num_tokens = shares.shape[1]
        width = max(1, num_tokens // 64)
        whole = num_tokens // width * width
        drawn = shares[:, :whole].unflatten(1, (-1, width)).mean(2).T
        figure, axes = _panel("position", "share merged or dropped")
        _draw_layers(axes, range(0, whole, width), drawn, drawn.mean(1))
        self._save(figure, "decision_over_position.png")
        rows = [[position, *_numbers(row, row.mean())] for position, row in enumerate(shares.T)]
        self.table("decision_over_position.csv", ["position", *_layer_names(len(shares))], rows)

    def segment_lengths(self, counts: Tensor) -> None:
        """Number of segments of each length, int64 [L, longest + 1]."""
        total = counts.sum(0)
        figure, axes = _panel("tokens of a segment", "segments")
        axes.bar(range(1, len(total)), total[1:].tolist())
        axes.set_yscale("log")
        self._save(figure, "segment_lengths.png")
        rows = [[length, int(total[length]), *counts[:, length].tolist()] for length in range(1, len(total))]
        self.table("segment_lengths.csv", ["tokens", *_layer_names(len(counts))], rows)

    def ratio_over_training(self, steps: list[int], held: Tensor) -> None:
        """Shares held at each validation, [S, L, H]: the paper's figure 7."""
        draw_ratio_evolution(steps, held, self.path("ratio_over_training.png"))
        rows = [[step, *cell] for step, each in zip(steps, held, strict=True) for cell in _cells(1 / each)]
        self.table("ratio_over_training.csv", ["step", "layer", "head", "ratio"], rows)

    def survivors(self, shares: Tensor) -> None:
        """Share of the sequences in which a head still holds the token at a position, [L, H, T]."""
        by_layer = shares.mean(1)
        figure = Figure(figsize=(10, max(2.6, 0.25 * len(by_layer) + 1.4)), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(by_layer.numpy(), aspect="auto", cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
        axes.set(xlabel="position", ylabel="layer", title="tokens that are still held")
        figure.colorbar(image, label="share of heads and sequences")
        self._save(figure, "survivors.png")
        rows = [
            [layer, position, *of_heads]
            for layer, positions in enumerate(shares.transpose(1, 2).tolist())
            for position, of_heads in enumerate(positions)
        ]
        heads = [f"head_{index}" for index in range(shares.shape[1])]
        self.table("survivors.csv", ["layer", "position", *heads], rows)

    def _save(self, figure: Figure, name: str) -> None:
        figure.savefig(self.path(name), dpi=120)


def _cells(values: Tensor) -> list[list[object]]:
    return [[layer, head, value] for layer, row in enumerate(values.tolist()) for head, value in enumerate(row)]


def _numbers(of_layers: Tensor, of_all: Tensor) -> list[float]:
    return [float(of_all), *of_layers.tolist()]


def _layer_names(num_layers: int) -> list[str]:
    return ["all", *(f"layer_{index}" for index in range(num_layers))]


def _panel(x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def _draw_layers(axes: Axes, places: Sequence[int], of_layers: Tensor, of_all: Tensor) -> None:
    """Draw a thin line for each layer, the first dark and the last bright, and a thick one for all."""
    num_layers = of_layers.shape[1]
    for layer in range(num_layers):
        color = colormaps["viridis"](layer / max(1, num_layers - 1))
        ends = layer in (0, num_layers - 1)
        axes.plot(places, of_layers[:, layer].tolist(), color=color, lw=0.8, label=f"layer {layer}" if ends else None)
    axes.plot(places, of_all.tolist(), color="tab:red", lw=2, label="all")
    axes.legend()
