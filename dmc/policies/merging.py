"""Merging of evicted entries: their values, or keys and values, are added to entries that stay; without a host read."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dmc.kernels.base import LayerCache
from dmc.kernels.pages import places
from dmc.policies.base import Rewrite, oldest_first

MergeRule = Literal["weighted", "average"]
SIMILARITY_BLOCK = 512
"""Number of evicted entries that are compared at once with all that stay."""
TIE = 1e-6
"""Cosines that differ by less count as equal: a repeated token has the same value in the first layer."""


def most_similar(
    states: Tensor, source: Tensor, staying: Tensor, positions: Tensor, num_staying: int
) -> tuple[Tensor, Tensor]:
    """Find for some entries of a head the staying one of highest cosine similarity (D2O, eq. 9).

    Args:
        states: keys or values, [S, H, N, D].
        source: slots of the entries, int64 [S, H, K].
        staying: bool [S, H, N]; without one in a head its results mean nothing.
        positions: [S, H, N].
        num_staying: a bound of those that stay in a head.
    Returns:
        Similarity, float32 [S, H, K], and slot, int64 [S, H, K]; the older one of equals.
    """
    normed = torch.nn.functional.normalize(states.float(), dim=-1)
    order = oldest_first(staying, positions)[..., :num_staying]
    candidates = rows_of(normed, order).transpose(-1, -2)
    missing = ~staying.gather(2, order)[:, :, None]
    similarity, target = [], []
    for block in source.split(SIMILARITY_BLOCK, dim=-1):
        cosine = (rows_of(normed, block) @ candidates).masked_fill(missing, -2.0)
        highest = cosine.amax(-1, keepdim=True)
        similarity.append(highest[..., 0])
        target.append(order.gather(2, (cosine >= highest - TIE).byte().argmax(-1)))  # the first of them
    return torch.cat(similarity, dim=-1), torch.cat(target, dim=-1)


def merge_into(
    states: Tensor, source: Tensor, target: Tensor, merges: Tensor, similarity: Tensor, rule: MergeRule
) -> Tensor:
    """Merge entries into others (D2O, eq. 11-12): k_j <- (e k_j + sum_i exp(u_ij) k_i) / (e + sum_i exp(u_ij)).

    Args:
        states: keys or values, [S, H, N, D].
        source: slots of some entries, int64 [S, H, K].
        target: slot of the entry of the same head that each is merged into, int64 [S, H, K].
        merges: which of them merge, bool [S, H, K].
        similarity: u, [S, H, K].
        rule: the weights above, or the plain average.
    Returns:
        Float32 [S, H, N, D].
    """
    target_weight = 1.0 if rule == "average" else torch.e
    weight = (torch.ones_like(similarity) if rule == "average" else similarity.exp()).where(merges, 0.0)
    added = (weight[..., None] * rows_of(states, source).float()).where(merges[..., None], 0.0)  # 0 times NaN is NaN
    heads = torch.arange(0, states[..., 0].numel(), states.shape[2], device=states.device)
    place = ((target.flatten(0, 1) + heads[:, None]).flatten(),)  # atomic additions would not repeat on a GPU
    total = torch.full_like(states[..., 0], target_weight, dtype=torch.float32).flatten()
    total.index_put_(place, weight.flatten(), accumulate=True)
    merged = (target_weight * states.float()).flatten(0, 2).index_put_(place, added.flatten(0, 2), accumulate=True)
    return (merged / total[:, None]).view(states.shape)


def rows_of(states: Tensor, slots: Tensor) -> Tensor:
    """Copy the states [S, H, N, D] of slots, int64 [S, H, K]: [S, H, K, D]."""
    return states.gather(2, slots[..., None].expand(*slots.shape, states.shape[-1]))


def rewrite(layer: LayerCache, rows: Tensor, wanted: Rewrite | None) -> None:
    """Write new keys and values of entries that stay, of cache rows int64 [S], which hold one in each head at least."""
    if wanted is None:
        return
    chosen, every = wanted.slots >= 0, torch.arange(wanted.slots.shape[-1], device=rows.device)
    index = every.where(chosen, chosen.byte().argmax(-1, keepdim=True))  # a head's others repeat its first
    slots, writes = wanted.slots.gather(-1, index).clamp_min(0), chosen.any(-1)[..., None, None]
    place = places(layer.block_tables[rows], slots, layer.block_size)
    for pages, states in ((layer.key_pages, wanted.key), (layer.value_pages, wanted.value)):
        if states is not None:
            flat = pages.view(-1, pages.shape[-1])
            flat[place] = rows_of(states, index).to(pages.dtype).where(writes, flat[place])


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
