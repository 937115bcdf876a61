"""Blocks of the paged cache: a free list as a stack."""

from __future__ import annotations

import torch
from torch import Tensor


class OutOfBlocksError(RuntimeError):
    """The pool has fewer free blocks than were asked for; nothing was allocated."""


class BlockAllocator:
    """Hands out block ids 0..num_blocks-1 and takes them back.

    Raises:
        ValueError: `num_blocks` < 0.
    """

    def __init__(self, num_blocks: int, device: torch.device | str = "cpu") -> None:
        if num_blocks < 0:
            raise ValueError(f"num_blocks={num_blocks}: expected a number >= 0")
        self.num_blocks = num_blocks
        self._stack = torch.arange(num_blocks - 1, -1, -1, dtype=torch.int32, device=device)
        self._in_use = torch.zeros(num_blocks, dtype=torch.bool, device=device)
        self.num_free = num_blocks

    @property
    def num_in_use(self) -> int:
        """Blocks handed out."""
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> Tensor:
        """Take `count` blocks, int32 [count].

        Raises:
            OutOfBlocksError: fewer are free; nothing is taken.
        """
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks asked for, {self.num_free} of {self.num_blocks} are free")
        self.num_free -= count
        blocks = self._stack[self.num_free : self.num_free + count].clone()
        self._in_use[blocks.long()] = True
        return blocks

    def free(self, blocks: Tensor) -> None:
        """Give blocks back.

        Raises:
            RuntimeError: a block is not in use, or is named twice; nothing is given back.
        """
        index = blocks.long()
        if index.numel() == 0:
            return
        if not bool(self._in_use[index].all()) or index.unique().numel() != index.numel():
            raise RuntimeError("a block was freed twice")
        self._stack[self.num_free : self.num_free + index.numel()] = blocks.to(self._stack.dtype)
        self.num_free += index.numel()
        self._in_use[index] = False

    def grow(self, num_blocks: int) -> None:
        """Add blocks up to `num_blocks` in all."""
        added = torch.arange(num_blocks - 1, self.num_blocks - 1, -1, dtype=torch.int32, device=self._stack.device)
        in_use = torch.zeros(num_blocks, dtype=torch.bool, device=self._stack.device)
        in_use[: self.num_blocks] = self._in_use
        stack = torch.zeros(num_blocks, dtype=torch.int32, device=self._stack.device)
        stack[: self.num_free] = self._stack[: self.num_free]
        stack[self.num_free : self.num_free + added.numel()] = added
        self.num_free += added.numel()
        self.num_blocks, self._stack, self._in_use = num_blocks, stack, in_use
