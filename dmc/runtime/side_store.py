"""What a policy lets the cache keep beside keys and values, and how the cache treats it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dmc.runtime.paged_cache import CacheLayout


class SideLayout(Protocol):
    """What is to be kept, known before any of it is allocated."""

    def block_bytes(self, layout: CacheLayout, block_size: int) -> int:
        """Bytes that come with every block of keys and values."""

    def store(self, layout: CacheLayout, max_sequences: int, num_blocks: int, block_size: int) -> SideStore:
        """Allocate it for a cache with so many rows, and blocks of so many entries."""


class SideStore:
    """Comes and goes with the cache's rows and blocks; by default nothing is kept."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one sequence beside its blocks, on the cache's device."""
        return 0

    def open_row(self, row: int) -> None:
        """Forget what the row's last sequence left."""

    def close_row(self, row: int) -> None:
        """Give back what a row holds, if anything; may be called twice."""

    def grow(self, num_blocks: int) -> None:
        """Add blocks up to `num_blocks` in all."""

    def slots_elsewhere(self, row: int) -> Tensor:
        """Entries of a sequence that each head of a layer holds in slow memory and not in pages, int64 [L or 1]."""
        return torch.zeros(1, dtype=torch.long)

    def slow_bytes_allocated(self, row: int) -> int:
        """Bytes that a sequence holds in slow memory."""
        return 0

    def slow_bytes_used(self, row: int) -> int:
        """The same without the unused rest of its last blocks."""
        return 0


def with_more_rows(states: Tensor, num_rows: int) -> Tensor:
    """Copy `states` into a tensor with more rows, zeros behind."""
    grown = states.new_zeros(num_rows, *states.shape[1:])
    grown[: len(states)] = states
    return grown
