"""CAKE (arXiv:2503.12491): layers share the budget by the entropy and the variance of their attention."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from dmc.budget import Budget
from dmc.config.settings import Count, Positive, checked_dataclass
from dmc.policies.base import Entries
from dmc.policies.budgets import effective_window, spread_evenly
from dmc.policies.eviction import EvictionPolicy
from dmc.policies.scores import check_odd, pool_before


@checked_dataclass(frozen=True, kw_only=True)
class CAKE(EvictionPolicy):
    """Keep the window and, before it, the entries with the highest mean + gamma * variance of its attention.

    A layer's budget is in proportion to H^(1/tau1) * V^(1/tau2), entropy and variance of the window's attention to the
    entries before it. While generating, the budget is fixed and the newest query's attention decides. Differs from the
    authors' code: layer budgets have an exact total, no layer falls below its budget, neighbors are pooled by position.

    """

    budget: Budget
    window: Count = 32
    """Last queries that are observed, whose entries stay; at most half of the budget."""
    kernel_size: Count = 5
    """Size of the pooling kernel (mean), odd."""
    gamma: float = 200.0
    """Weight of the variance."""
    tau1: Positive = 1.0
    """Temperature of the entropy."""
    tau2: Positive = 1.0
    """Temperature of the variance."""
    cascading: bool = False
    """Whether each layer is compressed as soon as it is prefilled, and again as later layers follow."""

    grows: ClassVar[bool] = False
    needs_last_attention: ClassVar[bool] = True
    adapts_layers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_odd(self.kernel_size)

    @property
    @override
    def recompresses(self) -> bool:  # type: ignore[override]
        return self.cascading

    def observe(self, entries: Entries, limit: int) -> Tensor:
        """Mean + gamma * variance over the window's queries, pooled; +inf for the window itself."""
        rows, window = self._before_window(entries, limit)
        scores = (rows.mean(3) + self.gamma * variance(rows)).mean(2)
        return pool_before(entries, scores, window, self.kernel_size, "avg")

    def layer_weight(self, entries: Entries, limit: int) -> Tensor:
        """H^(1/tau1) * V^(1/tau2), over all query heads."""
        rows, _ = self._before_window(entries, limit)
        entropy = -(rows * (rows + 1e-10).log()).sum(dtype=torch.float64)
        shift = variance(rows).sum(dtype=torch.float64)
        return entropy.clamp_min(0) ** (1 / self.tau1) * shift ** (1 / self.tau2)

    def layer_budgets(self, weights: list[float], limit: int, num_layers: int, tokens_seen: int) -> list[int]:
        """In proportion to the weights, beside the window; an exact total."""
        window = effective_window(self.window, limit)
        total, weight = (limit - window) * num_layers, math.fsum(weights)
        shares = [
            int(total * layer_weight / weight) if weight > 0 else total // len(weights) for layer_weight in weights
        ]
        return [window + share for share in spread_evenly(shares, total, tokens_seen - window)]

    def scores(self, entries: Entries, budget: int | Tensor) -> Tensor:
        """Scores by the window; while generating, the newest query's attention; see `EvictionPolicy.scores`."""
        if entries.observed is not None:
            return entries.observed
        assert entries.last_attention is not None
        window = (entries.nominal // 2).clamp(1, self.window)
        return pool_before(entries, entries.last_attention, window, self.kernel_size, "avg")

    def _before_window(self, entries: Entries, limit: int) -> tuple[Tensor, int]:
        """Attention of the window's queries, 0 at the window's own tokens, [S, H, group, w, N]; and w."""
        assert entries.window_attention is not None
        window = effective_window(self.window, limit)
        before = entries.exists & ~entries.among_last(window)
        return entries.window_attention[..., -window:, :] * before[:, :, None, None], window


def variance(rows: Tensor) -> Tensor:
    """Unbiased variance over the window's queries, 0 for a single one; [..., w, N] -> [..., N]."""
    centered = rows - rows.mean(-2, keepdim=True)  # `var` over a dimension that is not the last is 20 times as slow
    return centered.square().sum(-2) / max(1, rows.shape[-2] - 1)
