"""D2O (arXiv:2406.13035): H2O with layer budgets; evicted entries merge into similar ones."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dmc.budget import Budget, rounded_down
from dmc.config.settings import NonNegative, Share, checked_dataclass
from dmc.policies.base import Entries, Rewrite, Sum
from dmc.policies.budgets import in_proportion, warn_once
from dmc.policies.eviction import EvictionPolicy
from dmc.policies.merging import MergeRule, merge_into, most_similar

LEAST_SHARE, MOST_SHARE = 0.01, 1.0
"""Bounds of a layer's share of the tokens seen."""

Allocation = Literal["variance", "reciprocal", "uniform", "exponential"]


@checked_dataclass(frozen=True, kw_only=True)
class D2O(EvictionPolicy):
    """Keep sinks, heavy hitters and recent entries; an evicted entry merges into the most similar one that stays.

    Layer l holds S_l = floor(alpha_l P) entries, P all tokens seen when a prompt ends, with alpha = softmax(-F_l), F_l
    the variance of the attention that its entries received (eq. 4-5). Entry i merges into j = argmax cos(k_i, k_j) if
    the similarity reaches the layer's threshold, a moving average (eq. 9-12). Differs from the paper: F_l is scaled
    within a layer, as in the authors' code (`scaled`); `allocation="exponential"` falls with depth alone, which is not
    the one of section 5.4. Differs from the code: a prompt is compressed when it ends, not after one more token;
    weights of a merge sum to 1; each KV head decides for itself; the total budget is met, no layer is left out.
    """

    budget: Budget
    sinks: NonNegative = 4
    """First tokens that stay; no more than S_l - 2."""
    beta: Share = 0.7
    """Weight of the newest similarity in the threshold."""
    similarity: Literal["key", "value"] = "key"
    """States whose cosine similarity is computed."""
    merge_rule: MergeRule = "weighted"
    """Weights of merged entries: by similarity, or equal."""
    allocation: Allocation = "variance"
    """How layers share the budget: see `layer_weight`."""
    scaled: bool = True
    """Whether the variances of a layer's heads are scaled to [0, 1] before their mean is taken; False: eq. 4's F, whose
    softmax gives some layers nearly all and others the least of 1 %."""
    heavy_to_recent: tuple[NonNegative, NonNegative] = (3, 1)
    """Ratio N : M of heavy hitters to recent entries."""

    grows: ClassVar[bool] = False
    needs_last_attention: ClassVar[bool] = True
    needs_prompt_attention: ClassVar[bool] = True
    adapts_layers: ClassVar[bool] = True
    merges: ClassVar[bool] = True  # type: ignore[misc]
    sums: ClassVar[tuple[Sum, ...]] = ("mass",)

    def __post_init__(self) -> None:
        if sum(self.heavy_to_recent) == 0:
            raise ValueError(f"heavy_to_recent={self.heavy_to_recent}: expected one number above 0")

    def memory_size(self, num_kv_heads: int, head_dim: int) -> int:
        """The threshold."""
        return 1

    def layer_weight(self, entries: Entries, limit: int) -> Tensor:
        """Return -F_l, whose softmax is the share, or a weight in proportion to the share: 1 / F_l, 1, or exp(-l / L).

        F_l: the mean over query heads of the variance of a head's attention to the entries. `scaled` first scales
        these variances to [0, 1] across the layer's heads.
        """
        if self.allocation in ("uniform", "exponential"):
            depth = entries.layer_index / entries.num_layers
            return torch.tensor(math.exp(-depth) if self.allocation == "exponential" else 1.0, dtype=torch.float64)
        assert entries.prompt_attention is not None
        variance = torch.stack([heads.flatten(0, 1).var(-1) for heads in entries.prompt_attention.double()])
        if self.scaled:
            variance = (variance - variance.min()) / (variance.max() - variance.min() + 1e-6)
        spread = variance.mean()
        return -spread if self.allocation == "variance" else 1 / (spread + 1e-6)

    def layer_budgets(self, weights: list[float], limit: int, num_layers: int, tokens_seen: int) -> list[int]:
        """Shares of the tokens seen in proportion to the weights, between 1 % and 100 %, that average 1 / CR."""
        average = limit / tokens_seen if self.budget.ratio is None else 1 / self.budget.ratio
        if self.allocation == "variance":
            weights = [math.exp(weight - max(weights)) for weight in weights]
        return [max(1, rounded_down(share * tokens_seen)) for share in clamped_shares(weights, average)]

    def scores(self, entries: Entries, budget: int | Tensor) -> Tensor:
        """Accumulated attention; +inf for sinks and recent entries; see `EvictionPolicy.scores`."""
        sinks: Any = (
            min(max(budget - 2, 0), self.sinks) if isinstance(budget, int) else (budget - 2).clamp(0, self.sinks)
        )
        if isinstance(sinks, int) and sinks < self.sinks:
            warn_once(f"sinks={self.sinks} do not fit a budget of {budget} entries: {sinks} stay")
        heavy = self.heavy_to_recent[0] * (budget - sinks) // sum(self.heavy_to_recent)
        stays = entries.among_first(sinks) | entries.among_last(budget - sinks - heavy)
        return entries.sums["mass"].masked_fill(stays, torch.inf)

    def merge(self, entries: Entries, leaving: Tensor, budget: int | Tensor) -> Rewrite | None:
        """Merge evicted entries that reach the threshold into the most similar entry of their head."""
        keys, values = entries.read_keys(), entries.read_values()
        most = 1 if isinstance(budget, Tensor) else entries.num_entries - budget  # that leave a head
        source = (~leaving).byte().argsort(dim=-1, stable=True)[..., :most]
        leaves, staying = leaving.gather(-1, source), entries.exists & ~leaving
        compared = keys if self.similarity == "key" else values
        num_staying = entries.num_entries - most
        similarity, target = most_similar(compared, source, staying, entries.positions, num_staying)
        self._move_threshold(entries.memory, leaves, similarity)
        merges = leaves & (similarity >= entries.memory[:, :, None])
        taken_in = torch.zeros_like(leaving, dtype=torch.long).scatter_add_(-1, target, merges.long()) > 0
        slots = entries.slots.expand_as(leaving).where(taken_in, -1)
        given = source, target, merges, similarity, self.merge_rule
        return Rewrite(slots, *(merge_into(states, *given) for states in (keys, values)))

    def _move_threshold(self, memory: Tensor, leaves: Tensor, similarity: Tensor) -> None:
        """Update the thresholds [S, 1] of sequences that evict: tau_t = beta u_t + (1 - beta) tau_(t-1)."""
        count = leaves.sum((1, 2))
        mean = similarity.where(leaves, 0.0).sum((1, 2)) / count
        moved = self.beta * mean + (1 - self.beta) * memory[:, 0]
        memory[:, 0] = torch.where(count > 0, mean.where(memory[:, 0].isnan(), moved), memory[:, 0])


def clamped_shares(weights: list[float], average: float) -> list[float]:
    """Divide `average * len(weights)` in proportion to weights, each share between 1 %, or the average, and 100 %.

    The excess over the upper clamp goes to the other layers in proportion, until none is above it; what the lower clamp
    adds is then taken from unclamped layers, or, if there are none, from those at the upper clamp.
    """
    total, least = average * len(weights), min(LEAST_SHARE, average)
    shares = in_proportion(weights, total, MOST_SHARE)
    full = [layer for layer, share in enumerate(shares) if share >= MOST_SHARE]
    free = [layer for layer in range(len(shares)) if layer not in full]
    while low := [layer for layer in free if shares[layer] < least]:
        for layer in low:
            shares[layer] = least
        free = [layer for layer in free if layer not in low] or full
        rest = total - math.fsum(share for layer, share in enumerate(shares) if layer not in free)
        for layer, share in zip(free, in_proportion([weights[i] for i in free], rest, MOST_SHARE), strict=True):
            shares[layer] = share
    return shares
