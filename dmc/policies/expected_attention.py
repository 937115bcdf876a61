"""Expected Attention (arXiv:2510.00636): expected attention of future queries distributed as the prompt's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import NonNegativeFloat
from torch import Tensor
from typing_extensions import override

from dmc.budget import Budget
from dmc.config.settings import Count, NonNegative, Share, checked_dataclass
from dmc.kernels.probabilities import softmax_with_sinks
from dmc.policies.base import Entries
from dmc.policies.eviction import EvictionPolicy
from dmc.policies.scores import keep_over_heads


@dataclass
class Moments:
    """Mean [H_q, D] and sum of squared deviations [H_q, D, D] of `count` queries before RoPE."""

    count: int
    mean: Tensor
    deviations: Tensor


@checked_dataclass(frozen=True, kw_only=True)
class ExpectedAttention(EvictionPolicy):
    """Keep the entries with the highest expected contribution to the output, over all heads of a layer (AdaKV).

    The prompt's queries before RoPE have mean mu and covariance S; R is the mean rotation of the next `future`
    positions. An entry's score is

        (softmax_i(k_i^T R mu / sqrt(d) + k_i^T R S R^T k_i / 2d) + epsilon) * ||v_i||_2

    with the mean over the group before the norm; the model's own attention sinks count in the softmax. Differs from the
    paper, as its code does: the norm is of v, not W_o v.
    """

    budget: Budget
    sinks: NonNegative = 4
    """First entries, which always stay; their queries are left out of the moments."""
    future: Count = 512
    """Number of positions after the prompt over which rotations are averaged."""
    epsilon: NonNegativeFloat = 0.01
    """Added to the expected attention, so that entries with hardly any are ranked by their values."""
    covariance: bool = True
    """Whether the score includes the queries' covariance beside their mean."""
    alpha_f: Share = 0.2
    """Share of its equal budget that every head keeps."""

    evicts_decoding: ClassVar[bool] = False
    grows: ClassVar[bool] = False
    gathers: ClassVar[bool] = True

    @property
    @override
    def rotates(self) -> bool:
        return True

    @property
    def serves_compressed(self) -> bool:
        """See `CachePolicy`: RoPE does not cover a borrowed neuron."""
        return False

    def gather(self, before: Moments | None, query: Tensor, begin: int) -> Moments | None:
        """Add queries, [H_q, T, D], from position `begin` on, to the moments of earlier ones (Chan et al.'s update)."""
        query = query[:, max(0, self.sinks - begin) :]
        if (count := query.shape[1]) == 0:
            return before
        mean = query.mean(1)
        centered = query - mean[:, None]
        new = Moments(count, mean, centered.transpose(1, 2) @ centered)
        if before is None:
            return new
        total, shift = before.count + count, mean - before.mean
        between = shift[:, :, None] * shift[:, None] * (before.count * count / total)
        return Moments(total, before.mean + shift * (count / total), before.deviations + new.deviations + between)

    def observe(self, entries: Entries, limit: int) -> Tensor:
        """The score above; +inf for the sinks; see `EvictionPolicy.observe`."""
        keys, heads = entries.read_keys().float()[0], entries.shape[1]  # [H, N, D]
        sinks = entries.among_first(min(self.sinks, limit))
        logits, column = keys.new_zeros(heads, 1, entries.num_entries), None
        if (moments := entries.gathered) is not None:
            unit = torch.eye(keys.shape[-1], device=keys.device)[None, :, None].expand(-1, -1, self.future, -1)
            ahead = entries.tokens_seen[:, None] + torch.arange(self.future, device=keys.device)
            turn = entries.rotate_queries(unit, ahead).mean(2)[0]  # row i is R e_i, [D, D]
            column = entries.attention_sinks
            mean = (moments.mean @ turn).unflatten(0, (heads, -1))
            logits = mean @ keys.transpose(1, 2)
            if self.covariance:
                spread = (turn.T @ (moments.deviations / moments.count) @ turn).unflatten(0, (heads, -1))
                logits = logits + ((keys[:, None] @ spread) * keys[:, None]).sum(-1) / 2
        logits = logits.masked_fill((sinks | ~entries.exists)[0, :, None], -torch.inf)
        attention = softmax_with_sinks(logits[None, :, :, None], column)[0, :, :, 0].mean(1)
        scores = (attention + self.epsilon) * entries.read_values().float()[0].norm(dim=-1)
        return scores[None].masked_fill(sinks, torch.inf)

    def keep(self, entries: Entries, budget: int) -> Tensor:
        """Choose over all heads; see `EvictionPolicy.keep`."""
        return keep_over_heads(entries, budget, self.alpha_f, min(self.sinks, entries.limit))
