"""What sequences hold where tokens are predicted, summed up on the device: memory over a text, not only at its end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dmc.kernels.base import VisibleKeys
from dmc.kernels.batch import ForwardBatch

SlotIndex = slice | Tensor | None
"""Rows of the cache."""


@dataclass
class Held:
    """Sums over the positions of one sequence whose predictions were asked for."""

    positions: int = 0
    """How many."""
    tokens: int = 0
    """Tokens seen at each, the position's own included."""
    recent: int = 0
    """Of these, raw ones that a delay holds back, for each head."""
    saved: tuple[Tensor, Tensor] | None = None
    """What the tally had of a sequence that has lost its place in the cache."""

    def add(self, first: int, count: int, delay: int) -> None:
        """Count the positions first..first+count-1."""
        self.positions += count
        self.tokens += sum(range(first + 1, first + count + 1))
        self.recent += sum(min(seen, delay) for seen in range(first + 1, first + count + 1))


class Tally:
    """Sums of entries and blocks by row; adding to them never waits for the device.

    A single token counts as what its sequence holds after the pass; several that are fed together as what each would
    have left, fed alone: nothing is evicted between them.

    Args:
        shape: layers, rows and KV heads.
        block_size: entries of a block.
        device: of the cache.
    """

    def __init__(self, shape: tuple[int, int, int], block_size: int, device: torch.device) -> None:
        self._block_size, self._device = block_size, device
        self.slots = torch.zeros(shape, dtype=torch.long, device=device)
        """Entries in pages, summed over positions, [L, C, H]."""
        self.blocks = torch.zeros(2, shape[1], dtype=torch.long, device=device)
        """Blocks of all layers and heads: summed over positions, and the most of any, [2, C]."""
        self._first: Tensor | None = None  # where those begin that are counted inside a pass, int64 [C]

    def open_row(self, row: int, held: Held) -> None:
        """Go on with what a sequence had before it lost its place, or begin with nothing."""
        self.slots[:, row], self.blocks[:, row] = (0, 0) if held.saved is None else held.saved
        held.saved = None

    def close_row(self, row: int, held: Held) -> None:
        """Give a sequence what has been summed up, for the place that it gets next."""
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
        """Add what is held after each new token of a layer, where several of a sequence are watched.

        Args:
            layer_index: which one.
            batch: the tokens.
            seen: by their queries.
        """
        if self._first is None or batch.most_new == 1:
            return
        lengths = seen.slots.long()
        if seen.top is not None:
            lengths = lengths + seen.top.exists[:, None]
        rows = batch.row_index[batch.sequence]
        lengths = lengths * (batch.positions >= self._first[rows])[:, None]  # [T, H]
        self.slots[layer_index].index_add_(0, rows, lengths)
        self.blocks[0].index_add_(0, rows, self._blocks_of(lengths).sum(1))

    def index(self, rows: list[int]) -> SlotIndex:
        """Make what `count_last` finds rows by, before the pass: from the host afterwards it would wait; None: none."""
        if not rows:
            return None
        are_neighbours = rows == list(range(rows[0], rows[0] + len(rows)))
        return slice(rows[0], rows[0] + len(rows)) if are_neighbours else torch.tensor(rows, device=self._device)

    def count_last(self, where: SlotIndex, lengths: Tensor, adds: bool) -> None:
        """Count what rows hold after a pass.

        Args:
            where: from `index`.
            lengths: of the cache, [L, C, H].
            adds: whether the last token has to be added; else each has been counted before.
        """
        if where is None:
            return
        held = lengths[:, where]
        blocks = self._blocks_of(held).sum((0, 2))
        if adds:
            self.slots[:, where] += held
            self.blocks[0, where] += blocks
        self.blocks[1, where] = self.blocks[1, where].maximum(blocks)

    def beyond(self, row: int, held: Held, lengths: Tensor) -> tuple[Tensor, int, int]:
        """Compare with what a row holds now.

        Args:
            row: of the sequence.
            held: how many positions have been counted.
            lengths: entries in its pages, [L, H].
        Returns:
            How much more than now the positions held, in sum: entries [L, H], and blocks; and the most blocks any held
            beyond those of now. All 0 where none has been counted.
        """
        lengths = lengths.long()
        blocks = int(self._blocks_of(lengths).sum())
        total, most = self.blocks[:, row].tolist()
        if not held.positions:
            return torch.zeros_like(lengths), 0, 0
        return self.slots[:, row] - held.positions * lengths, total - held.positions * blocks, most - blocks

    def _blocks_of(self, lengths: Tensor) -> Tensor:
        return (lengths + (self._block_size - 1)) // self._block_size
