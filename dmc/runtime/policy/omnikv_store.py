"""What OmniKV keeps of each sequence: the queries that choose, and the last choice."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dmc.policies.omnikv import OmniKV
from dmc.runtime.cache_attention import Group
from dmc.runtime.paged_cache import CacheLayout
from dmc.runtime.policy.slow_pool import Lane, SlowPool
from dmc.runtime.side_store import SideStore


@dataclass(frozen=True)
class OmniKVLayout:
    """Says what is kept for a policy that is fitted to the model."""

    policy: OmniKV

    def block_bytes(self, layout: CacheLayout, block_size: int) -> int:
        """Nothing comes with a block."""
        return 0

    def store(self, layout: CacheLayout, max_sequences: int, num_blocks: int, block_size: int) -> OmniKVStore:
        """See `SideLayout.store`."""
        if self.policy.offload:
            return OffloadedStore(self.policy, layout, max_sequences, block_size)
        return OmniKVStore(self.policy, layout, max_sequences)


class OmniKVStore(SideStore):
    """Last queries of the filter layers, in rings, and what they have chosen last; nothing where nobody asks.

    Args:
        policy: fitted to the model.
        layout: of the cache.
        max_sequences: rows.
    """

    def __init__(self, policy: OmniKV, layout: CacheLayout, max_sequences: int) -> None:
        self._policy, self._rows = policy, max_sequences
        self._place = {chooser: i for i, chooser in enumerate(policy.sparse_layers(layout.num_layers))}
        self._queries: Tensor | None = None  # [filters, C, W, H_q, D], the query at position p lies at p % W
        self._chosen = torch.full((len(self._place), max_sequences, 0), -1, dtype=torch.int32, device=layout.device)

    @property
    def row_bytes(self) -> int:
        """See `SideStore.row_bytes`."""
        parts = [self._chosen] if self._queries is None else [self._chosen, self._queries]
        return sum(part[:, 0].numel() * part.element_size() for part in parts)

    def open_row(self, row: int) -> None:
        """See `SideStore.open_row`."""
        self._chosen[:, row] = -1

    def remember(self, chooser: int, group: Group, query: Tensor) -> None:
        """Keep the last queries [S, H_q, n, D] of a filter layer, if more than the newest one choose."""
        window = self._policy.num_queries
        if window == 1:
            return
        if self._queries is None:
            shape = (len(self._place), self._rows, window, query.shape[1], query.shape[3])
            self._queries = query.new_zeros(shape)
        place = group.positions[:, -window:] % window
        self._queries[self._place[chooser], group.rows[:, None], place] = query[:, :, -window:].transpose(1, 2)

    def queries(self, chooser: int, group: Group) -> tuple[Tensor, Tensor]:
        """Return a filter layer's last queries, oldest first.

        Returns:
            [S, H_q, W, D], and their positions, negative where there is none, int64 [S, W].
        """
        assert self._queries is not None
        window = self._policy.num_queries
        positions = group.positions[:, -1:] + torch.arange(1 - window, 1, device=group.rows.device)
        found = self._queries[self._place[chooser], group.rows[:, None], positions % window]
        return found.transpose(1, 2), positions

    def forget_choice(self, chooser: int, group: Group) -> None:
        """Let the next choice be a new one."""
        self._chosen[self._place[chooser], group.rows] = -1

    def last_choice(self, chooser: int, group: Group, width: int) -> Tensor:
        """Return what a filter layer chose last, int64 [S, width], -1 beyond."""
        missing = width - self._chosen.shape[-1]
        if missing > 0:
            self._chosen = torch.nn.functional.pad(self._chosen, (0, missing), value=-1)
        return self._chosen[self._place[chooser], group.rows, :width].long()

    def keep_choice(self, chooser: int, group: Group, positions: Tensor) -> None:
        """Remember a choice, int64 [S, width] as in `last_choice`."""
        place = self._place[chooser]
        self._chosen[place, group.rows, : positions.shape[1]] = positions.to(self._chosen.dtype)


class OffloadedStore(OmniKVStore):
    """Adds the slow pool. A sparse layer's pages hold room for what is chosen, then generated tokens.

    Args:
        policy: fitted to the model.
        layout: of the cache.
        max_sequences: rows.
        block_size: tokens of a block of the slow pool.
    """

    def __init__(self, policy: OmniKV, layout: CacheLayout, max_sequences: int, block_size: int) -> None:
        super().__init__(policy, layout, max_sequences)
        shape = layout.num_kv_heads, 2, layout.head_dim
        runs = policy.sparse_layers(layout.num_layers)
        self.pool = SlowPool(runs, shape, layout.dtype, max_sequences, block_size, Lane(layout.device))
        self.offloaded = torch.zeros(layout.num_layers, max_sequences, dtype=torch.long)
        """Tokens in the slow pool, the first ones of each sequence, [L, C]."""
        self.room = torch.zeros_like(self.offloaded)
        """Slots in pages for those that are chosen, [L, C]."""

    def close_row(self, row: int) -> None:
        """See `SideStore.close_row`."""
        self.pool.free(row)
        self.offloaded[:, row] = self.room[:, row] = 0

    def slots_elsewhere(self, row: int) -> Tensor:
        """See `SideStore.slots_elsewhere`: what is chosen lies in both pools."""
        return self.offloaded[:, row] - self.room[:, row]

    def slow_bytes_allocated(self, row: int) -> int:
        """See `SideStore.slow_bytes_allocated`."""
        return self.pool.bytes_of(row)

    def slow_bytes_used(self, row: int) -> int:
        """See `SideStore.slow_bytes_used`."""
        return int(self.offloaded[:, row].sum()) * self.pool.entry_bytes
