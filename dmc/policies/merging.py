"""Merging of evicted entries: their values, or keys and values, are added to entries that stay."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dmc.policies.base import oldest_first

MergeRule = Literal["weighted", "average"]
SIMILARITY_BLOCK = 512
"""Number of evicted entries that are compared at once with all that stay."""
TIE = 1e-6
"""Cosines that differ by less count as equal: a repeated token has the same value in the first layer."""


def most_similar(states: Tensor, leaving: Tensor, staying: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Find for each leaving entry of a head the staying one of highest cosine similarity (D2O, eq. 9).

    Args:
        states: keys or values, [S, H, N, D].
        leaving: bool [S, H, N].
        staying: bool [S, H, N]; every head with a leaving entry has one.
        positions: [S, H, N].
    Returns:
        For the leaving entries in the order of `leaving.nonzero()`: similarity, float32 [E], and slot, int64 [E];
        the older one of equals.
    """
    normed = torch.nn.functional.normalize(states.float(), dim=-1)
    order = oldest_first(staying, positions)[..., : int(staying.sum(-1).max())]
    candidates = normed.gather(2, order[..., None].expand(*order.shape, normed.shape[-1]))
    missing = ~staying.gather(2, order)[:, :, None]
    similarity, target = normed.new_zeros(leaving.shape), torch.zeros_like(leaving, dtype=torch.long)
    for begin in range(0, leaving.shape[-1], SIMILARITY_BLOCK):
        block = slice(begin, begin + SIMILARITY_BLOCK)
        if leaving[..., block].any():
            cosine = (normed[:, :, block] @ candidates.transpose(-1, -2)).masked_fill(missing, -2.0)
            highest = cosine.amax(-1, keepdim=True)
            similarity[..., block] = highest[..., 0]
            target[..., block] = order.gather(2, (cosine >= highest - TIE).byte().argmax(-1))  # the first of them
    return similarity[leaving], target[leaving]


def merge_into(
    states: Tensor, source: tuple[Tensor, Tensor, Tensor], target: Tensor, similarity: Tensor, rule: MergeRule
) -> Tensor:
    """Merge entries into others (D2O, eq. 11-12): k_j <- (e k_j + sum_i exp(u_ij) k_i) / (e + sum_i exp(u_ij)).

    Args:
        states: keys or values, [S, H, N, D].
        source: sequence, head and slot of the entries that merge, int64 [E] each.
        target: slot of the entry of the same head that each is merged into, int64 [E].
        similarity: u, [E].
        rule: the weights above, or the plain average.
    Returns:
        Float32 [S, H, N, D].
    """
    target_weight = 1.0 if rule == "average" else torch.e
    weight = torch.ones_like(similarity) if rule == "average" else similarity.exp()
    place = source[0], source[1], target
    total = torch.full(states.shape[:3], target_weight, device=states.device).index_put_(place, weight, accumulate=True)
    merged = (target_weight * states.float()).index_put_(
        place, weight[:, None] * states[source].float(), accumulate=True
    )
    return merged / total[..., None]


class Followers:
    """The up to `count` staying entries right after each entry of a head.

    Args:
        staying: bool [S, H, N].
        positions: [S, H, N].
        count: maximum number of them.
    """

    def __init__(self, staying: Tensor, positions: Tensor, count: int) -> None:
        self.order = oldest_first(staying, positions)
        """Slots of the staying entries by age, then the others: index r is the slot of rank r, int64 [S, H, N]."""
        beyond, total = torch.iinfo(torch.int32).max, staying.sum(-1, keepdim=True)
        ordered = positions.masked_fill(~staying, beyond).gather(-1, self.order)
        after = torch.searchsorted(ordered, positions.where(positions >= 0, beyond), right=True)
        self.first = torch.minimum(after, total)
        """Rank of each entry's first follower, int64 [S, H, N]."""
        self.last = torch.minimum(self.first + count, total)
        """Rank after each entry's last follower; `first` if it has none."""
        self.count = (self.last - self.first).clamp_min(1)
        """Number of each entry's followers, at least 1, [S, H, N]."""

    def mean(self, numbers: Tensor) -> Tensor:
        """Average numbers [S, H, N] over the followers of each entry; 0 without followers."""
        until = torch.nn.functional.pad(numbers.double().gather(-1, self.order).cumsum(-1), (1, 0))
        return ((until.gather(-1, self.last) - until.gather(-1, self.first)) / self.count).to(numbers.dtype)

    def spread(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Divide each entry's states [S, H, N, D] evenly among its followers.

        Returns:
            What the entry of each rank receives, [S, H, N, D], and whether it follows an entry whose states are not 0.
        """
        part = states / self.count[..., None]
        part = torch.cat((part, (states != 0).any(-1, keepdim=True)), dim=-1)
        edges = part.new_zeros(*part.shape[:2], part.shape[2] + 1, part.shape[3])
        edges.scatter_add_(2, self.first[..., None].expand_as(part), part)
        edges.scatter_add_(2, self.last[..., None].expand_as(part), -part)
        received = edges[:, :, :-1].cumsum(2)
        return received[..., :-1], received[..., -1] > 0.5
