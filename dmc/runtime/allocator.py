"""Blocks of the paged cache: a free list as a stack on the cache's device, and reference counts."""

from __future__ import annotations

import torch
from torch import Tensor


class OutOfBlocksError(RuntimeError):
    """Raised when the pool has fewer free blocks than were asked for; nothing was allocated."""


class BlockAllocator:
    """Owns block ids 0..num_blocks-1; kernels take them from `stack` on the device, and `free` returns them.

    Raises:
        ValueError: `num_blocks` < 0.
    """

    def __init__(self, num_blocks: int, device: torch.device | str = "cpu") -> None:
        if num_blocks < 0:
            raise ValueError(f"num_blocks={num_blocks}: expected a number >= 0")
        self.num_blocks = num_blocks
        self.stack = torch.arange(num_blocks - 1, -1, -1, dtype=torch.int32, device=device)
        """Free ids, the next one to take on top, int32 [num_blocks]."""
        self.height = torch.tensor([num_blocks], dtype=torch.int32, device=device)
        """Number of free ids on `stack`, int32 [1]."""
        self.extra = torch.zeros(num_blocks, dtype=torch.int32, device=device)
        """References to each block beyond the first, int32 [num_blocks]; 0 for a block that a kernel takes."""
        self._place = torch.arange(
            num_blocks - 1, -1, -1, device=device
        )  # stack index where each block was last put, except by kernels

    @property
    def num_free(self) -> int:
        """Number of free blocks; waits for the device."""
        return int(self.height)

    @property
    def num_in_use(self) -> int:
        """Number of allocated blocks; waits for the device."""
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> Tensor:
        """Take `count` blocks, int32 [count].

        Raises:
            OutOfBlocksError: fewer are free; nothing is taken.
        """
        free = self.num_free
        if count > free:
            raise OutOfBlocksError(f"{count} blocks were asked for, only {free} of {self.num_blocks} are free")
        self.height -= count
        return self.stack[free - count : free].clone()

    def share(self, blocks: Tensor) -> None:
        """Add a reference to blocks, ids [n], each named once; every holder frees them."""
        self.extra[blocks.long()] += 1

    def free(self, blocks: Tensor) -> None:
        """Drop a reference to each block, in time independent of their number; the last reference returns the block.

        Raises:
            RuntimeError: a block is not in use, or is named twice; nothing is freed. A block that a kernel has freed
                before is only noticed when more blocks are freed than there are.
        """
        blocks = blocks.long()
        is_shared = self.extra[blocks] > 0
        shared, blocks, free = blocks[is_shared], blocks[~is_shared], self.num_free
        before, after = self._place[blocks], torch.arange(free, free + blocks.numel(), device=blocks.device)
        twice = (before < free) & (self.stack[before] == blocks)
        self._place[blocks] = after
        twice |= self._place[blocks] != after  # a block that is named twice has one place only
        if free + blocks.numel() > self.num_blocks or bool(twice.any()):
            self._place[blocks] = before
            raise RuntimeError("a block was freed twice")
        self.extra[shared] -= 1
        self.stack[free : free + blocks.numel()] = blocks.to(self.stack.dtype)
        self.height += blocks.numel()

    def grow(self, num_blocks: int) -> None:
        """Add blocks up to a total of `num_blocks`; does not wait for the device."""
        added = torch.arange(num_blocks - 1, self.num_blocks - 1, -1, dtype=torch.int32, device=self.stack.device)
        stack = torch.cat((self.stack, added))
        on_top = self.height + torch.arange(added.numel(), device=stack.device)
        stack[on_top] = added
        self._place = torch.cat((self._place, added.flip(0).long()))
        self._place[added.long()] = on_top
        self.extra = torch.cat((self.extra, torch.zeros_like(added)))
        self.height += added.numel()
        self.num_blocks, self.stack = num_blocks, stack

    def reset(self) -> None:
        """Free every block, whoever holds it."""
        self.stack.copy_(torch.arange(self.num_blocks - 1, -1, -1))
        self._place.copy_(self.stack)  # the same permutation both ways
        self.extra.zero_()
        self.height.fill_(self.num_blocks)
