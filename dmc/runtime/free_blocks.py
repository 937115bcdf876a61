"""What the host knows of free blocks without waiting for the device, and what a forward pass may take of them."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from dmc.kernels.layout import CacheLayout
from dmc.runtime.allocator import BlockAllocator


class FreeBlocks:
    """Counts down: so many blocks were free when the device was last asked, and so many tokens were fed since.

    Every token is taken to be appended, so that at least `known - most_taken(fed_since)` blocks are free. All ranks
    know the least of any, for all must decide alike what fits.
    """

    def __init__(self, layout: CacheLayout, allocator: BlockAllocator, block_size: int, max_sequences: int) -> None:
        self._layout, self._allocator, self._block_size = layout, allocator, block_size
        no_limit = torch.iinfo(torch.int64).max
        limits = torch.tensor([no_limit] * layout.num_layers + list(layout.rings), device=layout.device)
        self._limits = limits[:, None, None]  # entries that a head of each layer can come to
        self._windows = Counter(layout.rings)
        self.known = allocator.num_blocks
        """Blocks that were free when this was last known, on every rank."""
        self.fed_since = torch.zeros(max_sequences, dtype=torch.long)
        """Tokens that each row was fed since, int64 [C]."""
        self.num_counted = 0
        """How often the device was asked, as whenever the host takes some."""

    def count(self) -> None:
        """Ask the device, and the other ranks."""
        self.note(self._layout.ranks.all_reduce(self._allocator.num_free, "min"))
        self.num_counted += 1

    def note(self, num_blocks: int, fed_since: Tensor | None = None) -> None:
        """Learn how many blocks were free, on every rank, before these rows were fed a token; None: none was."""
        self.known = num_blocks
        self.fed_since.zero_()
        if fed_since is not None:
            self.fed_since[fed_since] = 1

    @property
    def at_least(self) -> int:
        """Blocks that are free at least."""
        return self.known - self.most_taken(self.fed_since)

    def most_taken(self, num_fed: Tensor) -> int:
        """Blocks that rows may have taken that were fed so many tokens each, int64 [C]."""
        blocks = self._layout.num_layers * int((-(-num_fed // self._block_size)).sum())
        for window, count in self._windows.items():
            blocks += count * int((-(-num_fed.clamp_max(window) // self._block_size)).sum())
        return self._layout.num_kv_heads * blocks

    def left_after(self, rows: list[int] | Tensor, num_new: list[int] | Tensor | int) -> int:
        """Blocks that are free at least after these rows are fed so many tokens more each; < 0: some may be lacking."""
        fed = self.fed_since.clone()
        fed[rows] += torch.as_tensor(num_new, dtype=torch.long)
        return self.known - self.most_taken(fed)

    def needed(self, lengths: Tensor, num_new: list[int] | Tensor) -> int:
        """Blocks that heads of lengths [layers, S, H] take for so many more tokens; the most of any rank."""
        counts, lengths = torch.as_tensor(num_new, dtype=torch.long, device=lengths.device), lengths.long()
        grown = -(-(lengths + counts[None, :, None]).minimum(self._limits) // self._block_size)
        return self._layout.ranks.all_reduce(int((grown - -(-lengths // self._block_size)).sum()), "max")

    def missing(self, all_lengths: Tensor, rows: list[int] | Tensor, num_new: list[int] | Tensor, others: int) -> int:
        """Blocks that could be lacking if rows are fed and `others` are taken; <= 0: none.

        The device is asked only when what is known does not settle this.
        """
        if (left := self.left_after(rows, num_new) - others) >= 0:
            return -left
        if self.fed_since.any():
            self.count()
        return self.needed(all_lengths[:, rows], num_new) + others - self.known
