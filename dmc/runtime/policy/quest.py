"""Runs Quest: keeps the bounds of every page, and reads the pages that they promise most of."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from dmc.kernels.base import NewTokens
from dmc.policies.quest import Quest, upper_bounds
from dmc.policies.reading import top_positions
from dmc.runtime.cache_attention import CacheAttention, Group
from dmc.runtime.paged_cache import CacheLayout, PagedCache
from dmc.runtime.policy.reading import backend_for_pages, small_page_ids, small_pages
from dmc.runtime.sequence import Phase
from dmc.runtime.side_store import SideStore, with_more_rows


@dataclass(frozen=True)
class PageBoundsLayout:
    """Two keys for every page."""

    page_size: int

    def block_bytes(self, layout: CacheLayout, block_size: int) -> int:
        """See `SideLayout.block_bytes`."""
        return 2 * (block_size // self.page_size) * layout.head_dim * layout.dtype.itemsize

    def store(self, layout: CacheLayout, max_sequences: int, num_blocks: int, block_size: int) -> PageBounds:
        """See `SideLayout.store`."""
        return PageBounds(layout, num_blocks, block_size // self.page_size)


class PageBounds(SideStore):
    """Elementwise minimum and maximum of the keys of each page, which lie where the pages lie.

    Args:
        layout: of the cache.
        num_blocks: blocks of the pool.
        pages_per_block: pages of a block.
    """

    def __init__(self, layout: CacheLayout, num_blocks: int, pages_per_block: int) -> None:
        self.pages_per_block = pages_per_block
        shape = (num_blocks * pages_per_block, layout.head_dim)
        self.lowest = torch.zeros(shape, dtype=layout.dtype, device=layout.device)
        self.largest = torch.zeros_like(self.lowest)

    def grow(self, num_blocks: int) -> None:
        """See `SideStore.grow`."""
        self.lowest = with_more_rows(self.lowest, num_blocks * self.pages_per_block)
        self.largest = with_more_rows(self.largest, num_blocks * self.pages_per_block)


class QuestAttention(CacheAttention):
    """Attends to everything in prompts and in the first layers, else to the most promising pages.

    Args:
        cache: storage; its side store keeps the bounds.
        backend: kernel module.
        policy: fitted to the cache.
    """

    def __init__(self, cache: PagedCache, backend: ModuleType, policy: Quest) -> None:
        super().__init__(cache, backend)
        assert isinstance(cache.notes, PageBounds)
        self.policy, self._bounds = policy, cache.notes
        self._page_backend = backend_for_pages(backend, cache.layout, policy.page_size)

    def attend(self, layer_index: int, group: Group, query: Tensor, tokens: NewTokens, scaling: float) -> Tensor:
        """See `CacheAttention.attend`."""
        seen = self.append(layer_index, tokens)
        if layer_index >= self.policy.dense_layers:
            self._bound(layer_index, group)
            if Phase.PROMPT not in group.phase and (reads := self._pages_read(group)) is not None:
                return self._attend_to_pages(layer_index, group, query, reads, scaling)
        return self.attend_to_all(layer_index, group, query, seen, scaling)

    def _pages_read(self, group: Group) -> list[int] | None:
        """How many pages each sequence reads; None: all of theirs."""
        reads = [self.policy.num_pages(place.begin + 1, place.prompt_end) for place in group.places]
        has = [place.begin // self.policy.page_size + 1 for place in group.places]
        return None if reads == has else reads

    def _bound(self, layer_index: int, group: Group) -> None:
        """Bound the pages that new tokens have entered."""
        layer, size, bounds = self.cache.layer(layer_index), self.policy.page_size, self._bounds
        end = group.positions[:, -1:] + 1
        first, last = group.positions[:, :1] // size, (end - 1) // size
        most = (group.positions.shape[1] - 1) // size + 2
        page = torch.minimum(first + torch.arange(most, device=end.device), last)  # [S, pages], the last one repeated
        ids = small_page_ids(layer.block_tables[group.rows], page[:, None], bounds.pages_per_block).long()
        keys = small_pages(layer.key_pages, size)[ids]  # [S, H, pages, size, D]
        slot = page[..., None] * size + torch.arange(size, device=end.device)
        missing = (slot >= end[..., None])[:, None, ..., None]
        bounds.lowest[ids] = keys.masked_fill(missing, torch.inf).amin(-2)
        bounds.largest[ids] = keys.masked_fill(missing, -torch.inf).amax(-2)

    def _attend_to_pages(
        self, layer_index: int, group: Group, query: Tensor, reads: list[int], scaling: float
    ) -> Tensor:
        """Attend from one generated token of each sequence to as many pages as `reads` says."""
        layer, size, bounds = self.cache.layer(layer_index), self.policy.page_size, self._bounds
        tables, device = layer.block_tables[group.rows], query.device
        heads, most = tables.shape[1], max(place.begin for place in group.places) // size + 1
        newest = group.positions // size  # [S, 1]
        page = torch.arange(most, device=device)
        ids = small_page_ids(tables, page.expand(len(tables), 1, -1), bounds.pages_per_block).long()
        grouped = query.float().view(len(tables), heads, -1, query.shape[-1])
        scores = upper_bounds(grouped, bounds.lowest[ids].float(), bounds.largest[ids].float())
        scores = scores.masked_fill((page == newest)[:, None], torch.inf)
        scores = scores.masked_fill((page > newest)[:, None], -torch.inf)
        counts = torch.tensor(reads, device=device)[:, None].expand(-1, heads)
        chosen = top_positions(scores, counts, max(reads))  # ascending: the newest page, which may not be full, is last
        lengths = (counts - 1) * size + group.positions % size + 1
        attended = self._page_backend.paged_attention(
            query[:, :, 0],
            small_pages(layer.key_pages, size),
            small_pages(layer.value_pages, size),
            ids.gather(2, chosen).int(),
            lengths.int(),
            scaling,
        )
        return attended[:, :, None]
