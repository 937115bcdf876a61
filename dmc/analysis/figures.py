"""What an analysis has found as CSV, and each table as the PNG that the page shows of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas
from torch import Tensor

from dmc.results.plots import draw_analysis


class Figures:
    """Writes tables and their plots into a folder, which is made with the first.

    Args:
        folder: where to.
        name: what is analysed, for the titles.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.paths: list[Path] = []
        """What has been written."""

    def path(self, name: str) -> Path:
        """Return where a file goes, and count it as written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.paths.append(self.folder / name)
        return self.paths[-1]

    def ratio_by_head(self, ratios: Tensor) -> None:
        """Compression ratio of each layer and KV head, [L, H]."""
        self._write("ratio_by_head", _by_head(ratios, "ratio"))

    def entries_by_head(self, entries: Tensor) -> None:
        """Entries that each layer and KV head holds, [L, H]."""
        self._write("entries_by_head", _by_head(entries, "entries"))

    def ratio_over_length(self, lengths: Sequence[int], ratios: Tensor) -> None:
        """Compression ratio of each layer, [S, L], after `lengths` tokens, S of them."""
        self._write("ratio_over_length", _of_layers("tokens", lengths, ratios, 1 / (1 / ratios).mean(1)))

    def decision_over_position(self, shares: Tensor) -> None:
        """Share of tokens that are merged or dropped at each position, [L, T]."""
        self._write("decision_over_position", _of_layers("position", range(shares.shape[1]), shares.T, shares.mean(0)))

    def segment_lengths(self, counts: Tensor) -> None:
        """Number of segments of each length, int64 [L, longest + 1]."""
        lengths = range(1, counts.shape[1])
        self._write("segment_lengths", _of_layers("tokens", lengths, counts[:, 1:].T, counts[:, 1:].sum(0)))

    def ratio_over_training(self, steps: list[int], held: Tensor) -> None:
        """Shares held at each validation, [S, L, H]: the paper's figure 7."""
        tables = [_by_head(1 / each, "ratio").assign(step=step) for step, each in zip(steps, held, strict=True)]
        self._write("ratio_over_training", pandas.concat(tables)[["step", "layer", "head", "ratio"]])

    def survivors(self, shares: Tensor) -> None:
        """Share of the sequences in which a head still holds the token at a position, [L, H, T]."""
        tables = [pandas.DataFrame(of_layer.T.numpy()).add_prefix("head_") for of_layer in shares]
        table = pandas.concat(tables, keys=range(len(tables)), names=["layer", "position"])
        self._write("survivors", table.reset_index())

    def _write(self, kind: str, table: pandas.DataFrame) -> None:
        draw_analysis(kind, table, self.name).write(self.path(f"{kind}.png"))
        table.to_csv(self.path(f"{kind}.csv"), index=False, lineterminator="\n")


def _by_head(values: Tensor, name: str) -> pandas.DataFrame:
    table = pandas.DataFrame(values.numpy()).stack().rename_axis(["layer", "head"])
    return table.rename(name).reset_index()


def _of_layers(axis: str, places: Sequence[int], of_layers: Tensor, of_all: Tensor) -> pandas.DataFrame:
    """Put values of each layer, [places, L], beside those of all."""
    table = pandas.DataFrame(of_layers.numpy()).add_prefix("layer_")
    table.insert(0, axis, list(places))
    table.insert(1, "all", of_all.numpy())
    return table
