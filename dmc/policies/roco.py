"""RoCo (arXiv:2402.06262): mean attention, except that entries whose attention varies most always stay."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field, StrictFloat
from torch import Tensor

from dmc.budget import Budget
from dmc.config.settings import checked_dataclass
from dmc.policies.base import Entries, Sum
from dmc.policies.budgets import keep_top
from dmc.policies.eviction import EvictionPolicy

NEWEST = 10
"""Number of last entries whose deviation counts as infinite, because too few queries have seen them."""


@checked_dataclass(frozen=True, kw_only=True)
class RoCo(EvictionPolicy):
    """Keep the r + 1 entries with the largest deviation of attention, and of the others those with the highest mean.

    mu_j = S_j / c_j and sigma_j = sqrt(Q_j / c_j - mu_j^2) over the c_j queries since the entry came, with attention
    averaged over the group; r = floor(recent_ratio * b). Differs from the authors' code (EasyKV): the whole cache is
    ranked, prompt included, in the same way when the prompt ends and after every token.
    """

    budget: Budget
    recent_ratio: Annotated[StrictFloat, Field(ge=0, lt=1)] = 0.3
    """Share of the budget that is chosen by deviation; at 1 no entry could be evicted."""

    sums: ClassVar[tuple[Sum, ...]] = ("mass", "squares")
    needs_last_attention: ClassVar[bool] = True

    def scores(self, entries: Entries, budget: int | Tensor) -> Tensor:
        """Mean attention; +inf for the safe ones; see `EvictionPolicy.scores`."""
        mean = entries.sums["mass"] / entries.num_queries
        deviation = (entries.sums["squares"] / entries.num_queries - mean.square()).clamp_min(0).sqrt()
        counts = entries.nominal.new_full((1,), budget) if isinstance(budget, int) else budget
        num_safe = (self.recent_ratio * counts.double()).long() + 1
        deviation = deviation.masked_fill(entries.among_last(num_safe.clamp_max(NEWEST)), torch.inf)
        deviation = entries.in_order(deviation.masked_fill(~entries.exists, -torch.inf))
        return mean.masked_fill(entries.by_slot(keep_top(deviation, num_safe[:, None, None])), torch.inf)
