"""LAVa (arXiv:2509.09754): dynamic budgets over layers and heads that minimize the loss in each layer's output."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from dmc.budget import rounded_down
from dmc.config.settings import Ratio, Share, checked_dataclass
from dmc.policies.base import Entries
from dmc.policies.budgets import effective_window, in_proportion, pyramid
from dmc.policies.scores import keep_over_heads, pool_before
from dmc.policies.snapkv import SnapKV


@checked_dataclass(frozen=True, kw_only=True)
class LAVa(SnapKV):
    """Keep the entries of a layer with the highest s_h[i] = max_k ||V_h[k]||_1 * mean_j A_h^j[i], pooled.

    Layers share the budget in proportion to the entropy of their scores (eq. 7-8). Each layer is compressed after its
    prefill, and again as later layers follow (algorithm 2), so at most the budget and one layer are held.
    Differs from the paper: the entropy is divided by its maximum log(H N), as in the authors' code; eq. 7 divides by
    H N. Both give the same shares while all layers have equally many entries. Differs from the code: budget
    that a layer cannot use goes to the others, and no head has a floor unless `floor` is set.
    """

    layer_budget: Literal["entropy", "uniform", "pyramid"] = "entropy"
    """How layers share the budget; uniform is the paper's ablation "-layer"."""
    head_budget: Literal["pooled", "equal"] = "pooled"
    """Whether the heads of a layer compete for its budget; equal is the paper's ablation "-head"."""
    beta: Ratio = 20.0
    """See `PyramidKV`; for `layer_budget="pyramid"`."""
    floor: Share = 0.0
    """Share of its equal budget that every head keeps, as in AdaKV."""

    @property
    @override
    def adapts_layers(self) -> bool:  # type: ignore[override]
        return self.layer_budget == "entropy"

    @property
    @override
    def recompresses(self) -> bool:  # type: ignore[override]
        return self.adapts_layers

    def observe(self, entries: Entries, limit: int) -> Tensor:
        """The score above, the maximum over the group; +inf for the window itself; see `EvictionPolicy.observe`."""
        assert entries.window_attention is not None
        window = effective_window(self.window, limit)
        norms = entries.read_values().float().abs().sum(-1).masked_fill(~entries.exists, 0.0)
        scores = entries.window_attention[..., -window:, :].mean(3) * norms.amax(-1)[..., None, None]
        pooled = [
            pool_before(entries, of_member, window, self.kernel_size, self.pooling) for of_member in scores.unbind(2)
        ]
        return torch.stack(pooled).amax(0)

    def layer_weight(self, entries: Entries, limit: int) -> Tensor:
        """Entropy of the layer's scores as one distribution, over its maximum; 0 if no score is above 0."""
        assert entries.observed is not None
        outside_window = entries.exists & (entries.observed < torch.inf)
        scores = entries.observed.double().where(outside_window, 0.0)
        total, most = scores.sum(), outside_window.sum().double().log().clamp_min(1e-9)
        share = scores / total
        return (-torch.xlogy(share, share).sum() / most).where(total != 0, 0.0)

    def layer_budgets(self, weights: list[float], limit: int, num_layers: int, tokens_seen: int) -> list[int]:
        """In proportion to the entropies, beside the window."""
        window = effective_window(self.window, limit)
        if self.layer_budget == "uniform":
            return [limit] * len(weights)
        if self.layer_budget == "pyramid":
            budgets = pyramid(limit - window, num_layers, self.beta, tokens_seen - window)
        else:
            shares = in_proportion(weights, (limit - window) * num_layers, cap=tokens_seen - window)
            budgets = [rounded_down(share) for share in shares]
        return [window + budget for budget in budgets[: len(weights)]]

    def keep(self, entries: Entries, budget: int) -> Tensor:
        """Choose over all heads, or in each; see `EvictionPolicy.keep`."""
        if self.head_budget == "equal":
            return super().keep(entries, budget)
        return keep_over_heads(entries, budget, self.floor, effective_window(self.window, entries.limit))
