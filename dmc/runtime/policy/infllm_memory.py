"""What InfLLM keeps beside keys and values: the attention that entries receive, and a key for each block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dmc.runtime.paged_cache import CacheLayout
from dmc.runtime.policy.reading import small_page_ids
from dmc.runtime.side_store import SideStore, with_more_rows


@dataclass(frozen=True)
class BlockMemoryLayout:
    """A number for each entry, and a key for each of InfLLM's blocks, where its first entry lies."""

    first_token: int
    """Where blocks begin."""
    tokens_per_block: int
    """InfLLM's, not the cache's."""

    def keys_per_block(self, block_size: int) -> int:
        """Most of InfLLM's blocks that begin in one of the cache's."""
        return -(-block_size // self.tokens_per_block)

    def block_bytes(self, layout: CacheLayout, block_size: int) -> int:
        """See `SideLayout.block_bytes`: float32."""
        return 4 * (block_size + self.keys_per_block(block_size) * layout.head_dim)

    def store(self, layout: CacheLayout, max_sequences: int, num_blocks: int, block_size: int) -> BlockMemory:
        """See `SideLayout.store`."""
        return BlockMemory(self, layout, max_sequences, num_blocks, block_size)


class BlockMemory(SideStore):
    """Lies in pages under the cache's own block tables, so that it comes and goes with the blocks.

    Args:
        layout: of what is kept.
        cache_layout: of the cache.
        max_sequences: rows.
        num_blocks: blocks of the pool.
        block_size: entries of a block of the cache.
    """

    def __init__(
        self, layout: BlockMemoryLayout, cache_layout: CacheLayout, max_sequences: int, num_blocks: int, block_size: int
    ) -> None:
        self._layout, self._block_size = layout, block_size
        self._keys_per_block = layout.keys_per_block(block_size)
        self._received = torch.zeros(num_blocks * block_size, device=cache_layout.device)
        shape = num_blocks * self._keys_per_block, cache_layout.head_dim
        self._keys = torch.zeros(shape, device=cache_layout.device)
        self.num_represented = torch.zeros(cache_layout.num_layers, max_sequences, dtype=torch.long)
        """Blocks of each sequence that have a key, [L, C]."""

    def open_row(self, row: int) -> None:
        """See `SideStore.open_row`."""
        self.num_represented[:, row] = 0

    def grow(self, num_blocks: int) -> None:
        """See `SideStore.grow`."""
        self._received = with_more_rows(self._received, num_blocks * self._block_size)
        self._keys = with_more_rows(self._keys, num_blocks * self._keys_per_block)

    def begin(self, block_tables: Tensor, positions: Tensor) -> None:
        """Let new entries have received nothing; int32 [S, H, M], int64 [S, n]."""
        self._received[self._entries(block_tables, positions)] = 0

    def add(self, block_tables: Tensor, positions: Tensor, received: Tensor) -> None:
        """Add attention [S, H, n] to entries [S, n], some of them named several times."""
        self._received.index_put_((self._entries(block_tables, positions),), received, accumulate=True)

    def received(self, block_tables: Tensor, positions: Tensor) -> Tensor:
        """Return the attention that entries [S, n] have received, [S, H, n]."""
        return self._received[self._entries(block_tables, positions)]

    def represent(self, block_tables: Tensor, blocks: Tensor, keys: Tensor) -> None:
        """Keep the keys [S, H, n, D] of InfLLM's blocks [n]."""
        self._keys[self._places(block_tables, blocks)] = keys

    def keys(self, block_tables: Tensor, blocks: Tensor) -> Tensor:
        """Return the keys of InfLLM's blocks [n]; anything where there is none; [S, H, n, D]."""
        return self._keys[self._places(block_tables, blocks)]

    def _entries(self, block_tables: Tensor, positions: Tensor) -> Tensor:
        return small_page_ids(block_tables, positions[:, None], self._block_size).long()

    def _places(self, block_tables: Tensor, blocks: Tensor) -> Tensor:
        first = self._layout.first_token + blocks * self._layout.tokens_per_block
        table = block_tables[:, :, first // self._block_size].long()
        return table * self._keys_per_block + first % self._block_size // self._layout.tokens_per_block
