"""Recency: a local window, and StreamingLLM (arXiv:2309.17453), which adds attention sinks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dmc.budget import Budget
from dmc.policies.base import Entries, EvictionPolicy


@dataclass(frozen=True, kw_only=True)
class LocalWindow(EvictionPolicy):
    """Keep the last entries."""

    budget: Budget

    def scores(self, entries: Entries, budget: int | Tensor) -> Tensor:
        """The younger, the higher."""
        return entries.ages.float().expand(entries.positions.shape)


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(LocalWindow):
    """Keep the first tokens (attention sinks) and the last ones.

    Differs from the authors' code: tokens stay at their own positions.

    Raises:
        ValueError: `sinks` is negative.
    """

    sinks: int = 4
    """First tokens that stay; a budget that leaves no recent entry beside them keeps fewer."""

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ValueError(f"sinks={self.sinks}: expected a number of tokens >= 0")

    def scores(self, entries: Entries, budget: int | Tensor) -> Tensor:
        """Age; +inf for the sinks."""
        sinks = torch.as_tensor(budget - 1).clamp_max(self.sinks).view(-1, 1, 1)
        return super().scores(entries, budget).masked_fill(entries.ages < sinks, torch.inf)
