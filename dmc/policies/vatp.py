"""VATP (arXiv:2406.12335): attention weighted by the norm of the value."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from dmc.config.settings import NonNegative, checked_dataclass
from dmc.policies.base import Entries, Sum
from dmc.policies.budgets import warn_once
from dmc.policies.h2o import H2O


@checked_dataclass(frozen=True, kw_only=True)
class VATP(H2O):
    """Rank H2O's heavy hitters by accumulated attention times the L1 norm of the entry's value.

    The first tokens always stay, within the heavy half: their values are tiny.
    """

    sinks: NonNegative = 4
    """Number of first entries that stay; at most the heavy half."""

    sums: ClassVar[tuple[Sum, ...]] = ("mass", "value_norm")

    def base_scores(self, entries: Entries) -> Tensor:
        """S_j * ||v_j||_1."""
        return super().base_scores(entries) * entries.sums["value_norm"]

    def scores(self, entries: Entries, budget: int | Tensor) -> Tensor:
        """H2O's; +inf for the sinks; see `EvictionPolicy.scores`."""
        heavy = budget - self.num_recent(budget)
        if isinstance(heavy, int) and heavy < self.sinks:
            warn_once(f"sinks={self.sinks} do not fit the heavy half of a budget of {budget} entries: {heavy} are kept")
        sinks = min(heavy, self.sinks) if isinstance(heavy, int) else heavy.clamp_max(self.sinks)
        return super().scores(entries, budget).masked_fill(entries.among_first(sinks), torch.inf)
