"""AdaKV (arXiv:2407.11550): the heads of a layer compete for its budget."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from dmc.config.settings import Ratio, Share, checked_dataclass
from dmc.policies.base import Entries
from dmc.policies.budgets import effective_window, keep_pooled, keep_top, pyramid
from dmc.policies.scores import keep_over_heads
from dmc.policies.snapkv import SnapKV


@checked_dataclass(frozen=True, kw_only=True)
class AdaKV(SnapKV):
    """Keep the entries with the highest SnapKV scores of a whole layer (Ada-SnapKV, Ada-PyramidKV).

    Every head keeps its window and at least floor(alpha_f * b) more, b its share of the budget; the total is exact.
    Differs from the authors' code, which blends: head h gets round((1 - alpha_f) count_h + floor(alpha_f b)) and the
    total drifts (`official_blend`).
    """

    alpha_f: Share = 0.2
    """Share of its equal budget that every head keeps; 1 is SnapKV."""
    layer_budget: Literal["uniform", "pyramid"] = "uniform"
    """Budgets of the layers: the same for each, or PyramidKV's."""
    beta: Ratio = 20.0
    """See `PyramidKV`."""
    official_blend: bool = False
    """Whether head budgets are blended as in the authors' code."""

    def layer_budgets(self, weights: list[float], limit: int, num_layers: int, tokens_seen: int) -> list[int]:
        """Uniform, or the pyramid beside the window."""
        if self.layer_budget == "uniform":
            return [limit] * len(weights)
        window = effective_window(self.window, limit)
        budgets = pyramid(limit - window, num_layers, self.beta, tokens_seen - window)
        return [window + budget for budget in budgets[: len(weights)]]

    def keep(self, entries: Entries, budget: int) -> Tensor:
        """Choose over all heads; see `EvictionPolicy.keep`."""
        assert entries.observed is not None
        window = effective_window(self.window, entries.limit)
        if not self.official_blend:
            return keep_over_heads(entries, budget, self.alpha_f, window)
        floor = math.floor(self.alpha_f * (budget - window))
        scores = entries.in_order(entries.guarded(entries.observed).masked_fill(~entries.exists, -torch.inf))
        count = keep_pooled(scores, budget).sum(-1, keepdim=True) - window
        blended = ((1 - self.alpha_f) * count.double() + floor).round().long()  # half to even
        return entries.by_slot(keep_top(scores, window + blended))
