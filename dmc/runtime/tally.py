"""Memory of sequences averaged over predicted positions, not only at the end; sums are kept on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dmc.kernels.base import VisibleKeys
from dmc.kernels.batch import ForwardBatch

SlotIndex = slice | Tensor | None
"""Rows of the cache."""


@dataclass
class ScoredPositions:
    """Sums over the positions of one sequence whose predictions were requested."""

    positions: int = 0
    """Number of positions."""
    tokens: int = 0
    """Sum of the tokens seen at each position, its own included."""
    recent: int = 0
    """Sum of the raw tokens among them that a delay holds back, per head."""
    saved: tuple[Tensor, Tensor] | None = None
    """The tally's sums of a sequence that was preempted."""

    def add(self, first: int, count: int, delay: int) -> None:
        """Count the positions first..first+count-1."""
        last = first + count
        self.positions += count
        self.tokens += (first + 1 + last) * count // 2
        if delay:
            self.recent += sum(min(seen, delay) for seen in range(first + 1, last + 1))


class Tally:
    """Sums of entries and blocks by row; adding to them never waits for the device.

    A single token counts the entries after the pass; each of several tokens fed together counts the entries that it
    would have left, fed alone: nothing is evicted between them.

    Args:
        shape: layers, rows and KV heads.
        block_size: entries of a block.
        device: device of the cache.
    """

    def __init__(self, shape: tuple[int, int, int], block_size: int, device: torch.device) -> None:
        self._block_size, self._device = block_size, device
        self.slots = torch.zeros(shape, dtype=torch.long, device=device)
        """Entries in pages, summed over positions, [L, C, H]."""
        self.blocks = torch.zeros(2, shape[1], dtype=torch.long, device=device)
        """Blocks of all layers and heads: the sum over positions and the maximum, [2, C]."""
        self._first: Tensor | None = None  # first position that is counted inside a pass, int64 [C]

    def open_row(self, row: int, held: ScoredPositions) -> None:
        """Restore the sums of a preempted sequence, or begin at 0."""
        self.slots[:, row], self.blocks[:, row] = (0, 0) if held.saved is None else held.saved
        held.saved = None

    def close_row(self, row: int, held: ScoredPositions) -> None:
        """Save a sequence's sums, for the row that it gets next."""
        if held.positions:
            held.saved = self.slots[:, row].clone(), self.blocks[:, row].clone()

    def watch(self, rows: list[int], first: list[int]) -> None:
        """Count tokens of the next pass one by one: in these rows, from these positions on."""
        self._first = None
        if rows:
            begins = torch.full((self.slots.shape[1],), torch.iinfo(torch.long).max)
            begins[rows] = torch.tensor(first)
            self._first = begins.to(self._device)

    def count(self, layer_index: int, batch: ForwardBatch, seen: VisibleKeys) -> None:
        """Add the entries after each new token of a layer, where several tokens of a sequence are watched.

        Args:
            layer_index: index of the layer.
            batch: the tokens.
            seen: the keys that their queries see.
        """
        if self._first is None or batch.most_new == 1:
            return
        lengths = seen.slots.long()
        if seen.open_slot is not None:
            lengths = lengths + seen.open_slot.exists[:, None]
        rows = batch.row_index[batch.sequence]
        lengths = lengths * (batch.positions >= self._first[rows])[:, None]  # [T, H]
        self.slots[layer_index].index_add_(0, rows, lengths)
        self.blocks[0].index_add_(0, rows, self._blocks_of(lengths).sum(1))

    def index(self, rows: list[int]) -> SlotIndex:
        """Make the index of `count_last` before the pass, since a copy after it would wait; None: no rows."""
        if not rows:
            return None
        are_adjacent = rows == list(range(rows[0], rows[0] + len(rows)))
        return slice(rows[0], rows[0] + len(rows)) if are_adjacent else torch.tensor(rows, device=self._device)

    def count_last(self, where: SlotIndex, lengths: Tensor, adds: bool) -> None:
        """Count the entries of rows after a pass.

        Args:
            where: result of `index`.
            lengths: lengths of the cache, [L, C, H].
            adds: whether to add the last token; else each has been counted before.
        """
        if where is None:
            return
        held = lengths[:, where]
        blocks = self._blocks_of(held).sum((0, 2))
        if adds:
            self.slots[:, where] += held
            self.blocks[0, where] += blocks
        self.blocks[1, where] = self.blocks[1, where].maximum(blocks)

    def beyond(self, row: int, held: ScoredPositions, lengths: Tensor) -> tuple[Tensor, int, int]:
        """Compare the sums with a row's present entries.

        Args:
            row: cache row of the sequence.
            held: number of counted positions.
            lengths: entries in its pages, [L, H].
        Returns:
            Sum over positions of the excess over now, in entries [L, H] and blocks, and the largest excess of blocks.
            All 0 where no position has been counted.
        """
        lengths = lengths.long()
        blocks = int(self._blocks_of(lengths).sum())
        total, most = self.blocks[:, row].tolist()
        if not held.positions:
            return torch.zeros_like(lengths), 0, 0
        return self.slots[:, row] - held.positions * lengths, total - held.positions * blocks, most - blocks

    def _blocks_of(self, lengths: Tensor) -> Tensor:
        return (lengths + (self._block_size - 1)) // self._block_size
