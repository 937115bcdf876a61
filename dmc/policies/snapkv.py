"""SnapKV (arXiv:2404.14469): the entries that the last queries of the prompt attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dmc.budget import Budget
from dmc.policies.base import Entries
from dmc.policies.budgets import effective_window
from dmc.policies.eviction import EvictionPolicy
from dmc.policies.scores import Pooling, check_pooling, pool_before


@dataclass(frozen=True, kw_only=True)
class SnapKV(EvictionPolicy):
    """Keep the prompt's last `window` tokens and the entries they attend to most; evict nothing while generating.

    Differs from the authors' code: one set for each KV head, by the mean over its group taken before pooling.

    Raises:
        ValueError: the window is empty, or the pooling kernel is even or unknown.
    """

    budget: Budget
    window: int = 32
    """Number of last queries that are observed, whose tokens stay; at most half of the budget."""
    kernel_size: int = 7
    """Size of the pooling kernel, odd."""
    pooling: Pooling = "max"
    """Pooling over the neighborhood: max or avg."""

    evicts_decoding: ClassVar[bool] = False
    grows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window={self.window}: expected a number of queries >= 1")
        check_pooling(self.kernel_size, self.pooling)

    def observe(self, entries: Entries, limit: int) -> Tensor:
        """Mean attention of the window, pooled over neighbors; +inf for the window itself."""
        assert entries.window_attention is not None
        window = effective_window(self.window, limit)
        attention = entries.window_attention[..., -window:, :].mean((2, 3))
        return pool_before(entries, attention, window, self.kernel_size, self.pooling)

    def scores(self, entries: Entries, budget: int | Tensor) -> Tensor:
        """The result of `observe`; see `EvictionPolicy.scores`."""
        assert entries.observed is not None
        return entries.observed
