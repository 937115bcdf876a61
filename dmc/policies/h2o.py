"""Heavy-Hitter Oracle (H2O, arXiv:2306.14048): the most attended entries and the most recent ones."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from dmc.budget import Budget
from dmc.config.settings import NonNegative, checked_dataclass
from dmc.policies.base import Entries, Sum
from dmc.policies.eviction import EvictionPolicy


@checked_dataclass(frozen=True, kw_only=True)
class H2O(EvictionPolicy):
    """Keep half of the budget for the last entries, half for those with the most accumulated attention.

    Entry i has the score S_i = sum over queries t of A_t[i], A_t the attention of query t, mean over the group. The
    authors' code stores keys and values for every query head; here each KV head has one set. The recent half grows with
    the budget.
    """

    budget: Budget
    recent: NonNegative | None = None
    """Number of last entries that stay; None: half of the budget, rounded up."""
    normalize: bool = False
    """Whether accumulated attention is divided by the number of queries that saw the entry."""
    evict_decoding: bool = True
    """Whether entries are evicted while generating; else the cache grows after the prompt."""

    sums: ClassVar[tuple[Sum, ...]] = ("mass",)
    needs_last_attention: ClassVar[bool] = True

    @property
    @override
    def evicts_decoding(self) -> bool:  # type: ignore[override]
        return self.evict_decoding

    def scores(self, entries: Entries, budget: int | Tensor) -> Tensor:
        """Accumulated attention; +inf for the recent ones; see `EvictionPolicy.scores`."""
        return torch.where(entries.among_last(self.num_recent(budget)), torch.inf, self.base_scores(entries))

    def num_recent(self, budget: int | Tensor) -> int | Tensor:
        """Number of last entries that stay: `recent`, or ceil(b / 2), "equally divided" in the paper."""
        half = budget - budget // 2
        if self.recent is None:
            return half
        return budget.clamp_max(self.recent) if isinstance(budget, Tensor) else min(budget, self.recent)

    def base_scores(self, entries: Entries) -> Tensor:
        """Scores by which the heavy half is chosen."""
        mass = entries.sums["mass"]
        return mass / entries.num_queries if self.normalize else mass
