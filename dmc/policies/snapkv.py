"""SnapKV (arXiv:2404.14469): the entries that the last queries of the prompt attend to."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from dmc.budget import Budget
from dmc.config.settings import Count, checked_dataclass
from dmc.policies.base import Entries
from dmc.policies.budgets import effective_window
from dmc.policies.eviction import EvictionPolicy
from dmc.policies.scores import Pooling, check_odd, pool_before


@checked_dataclass(frozen=True, kw_only=True)
class SnapKV(EvictionPolicy):
    """Keep the prompt's last `window` tokens and the entries they attend to most; evict nothing while generating.

    Entry i has the score pool_i(mean of A_t[i] over the window's queries t and the group); A_t is the attention of t.
    Differs from the authors' code: one set for each KV head, by the mean over its group taken before pooling.
    """

    budget: Budget
    window: Count = 32
    """Number of last queries that are observed, whose tokens stay; at most half of the budget."""
    kernel_size: Count = 7
    """Size of the pooling kernel, odd."""
    pooling: Pooling = "max"
    """Pooling over the neighborhood: max or avg."""

    evicts_decoding: ClassVar[bool] = False
    grows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_odd(self.kernel_size)

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
