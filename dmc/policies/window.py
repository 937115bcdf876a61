"""Recency: a local window, and StreamingLLM (arXiv:2309.17453), which adds attention sinks."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from dmc.budget import Budget
from dmc.config.settings import NonNegative, checked_dataclass
from dmc.policies.base import Entries, Rewrite
from dmc.policies.budgets import warn_once
from dmc.policies.eviction import EvictionPolicy


@checked_dataclass(frozen=True, kw_only=True)
class LocalWindow(EvictionPolicy):
    """Keep the last entries."""

    budget: Budget

    def scores(self, entries: Entries, budget: int | Tensor) -> Tensor:
        """Positions: the youngest entry has the highest score; see `EvictionPolicy.scores`."""
        return entries.positions.float()


@checked_dataclass(frozen=True, kw_only=True)
class StreamingLLM(LocalWindow):
    """Keep the first entries (attention sinks) and the last ones.

    Differs from the authors' code: tokens keep their own positions. With `rerotate` the sinks move right before the
    last ones, so that distances are those inside the cache.
    """

    sinks: NonNegative = 4
    """Number of first entries that stay; fewer if the budget leaves no recent entry beside them."""
    rerotate: bool = False
    """Whether a generated token sees the sinks at the positions right before the last entries, as in the paper."""

    def __post_init__(self) -> None:
        if self.rerotate and self.protect:
            raise ValueError(
                f"protect={self.protect}: rerotate=True gives new positions to the sinks alone: give one of them"
            )

    @property
    @override
    def merges(self) -> bool:  # type: ignore[override]
        return self.rerotate and self.sinks > 0

    @property
    @override
    def rotates(self) -> bool:
        return self.merges

    def memory_size(self, num_kv_heads: int, head_dim: int) -> int:
        """Space for the sinks' original keys, for `rerotate`."""
        return self.sinks * num_kv_heads * head_dim if self.rerotate else 0

    def scores(self, entries: Entries, budget: int | Tensor) -> Tensor:
        """Positions; +inf for the sinks; see `EvictionPolicy.scores`."""
        if isinstance(budget, int) and budget - 1 < self.sinks:
            warn_once(f"sinks={self.sinks} do not fit a budget of {budget} entries: {max(budget - 1, 0)} are kept")
        sinks = min(budget - 1, self.sinks) if isinstance(budget, int) else (budget - 1).clamp_max(self.sinks)
        return super().scores(entries, budget).masked_fill(entries.among_first(sinks), torch.inf)

    def merge(self, entries: Entries, leaving: Tensor, budget: int | Tensor) -> Rewrite | None:
        """Rotate the sinks' keys by as many positions as entries were evicted.

        They are rotated from their keys at the first eviction: repeated rotations would add up errors.
        """
        gone = entries.tokens_seen - (entries.lengths - leaving.sum(-1))[:, 0]
        slots = entries.order[:, :, : self.sinks]
        before_gap = (entries.exists & (entries.in_order(leaving).cumsum(-1) == 0))[:, 0, : self.sinks]
        turns = gone[:, None] + entries.slots[: self.sinks] - entries.in_order(entries.positions)[:, 0, : self.sinks]
        turns = turns * before_gap
        keys = entries.read_keys()
        keys = keys.gather(2, slots[..., None].expand(*slots.shape, keys.shape[-1])).float()
        first = entries.memory.view(len(keys), keys.shape[1], self.sinks, -1)[:, :, : keys.shape[2]]
        is_new = first.isnan() & (turns > 0)[:, None, :, None]
        first.copy_(keys.where(is_new, first))
        turned = entries.rotate(first.nan_to_num(), turns)
        return Rewrite(slots.where((turns > 0)[:, None], -1), key=turned, value=None)
