"""How many entries each layer and head keeps, and which: exact totals, ties to the smaller head and position."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor


def effective_window(window: int, limit: int) -> int:
    """Shrink an observation window to half of a budget that is smaller than twice the window, but 1 at least."""
    return min(window, max(1, limit // 2))


def keep_top(scores: Tensor, count: int) -> Tensor:
    """Mark the `count` highest of the last dimension; of equal ones the first.

    Args:
        scores: [..., N], -inf where there is nothing.
        count: how many; fewer where there are not as many above -inf.
    Returns:
        Bool, shape of `scores`.
    """
    if count >= scores.shape[-1]:
        return scores > -torch.inf
    if count <= 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    cut = scores.topk(count, dim=-1, sorted=True).values[..., -1:]
    above, equal = scores > cut, scores == cut
    missing = count - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= missing))) & (scores > -torch.inf)


def keep_pooled(scores: Tensor, count: int, floor: int = 0) -> Tensor:
    """Mark the `count * H` highest over all heads of a layer (AdaKV), every head its own top `floor` among them.

    Args:
        scores: [S, H, N], -inf where there is nothing; no head has more than `floor` entries at +inf to keep.
        count: entries per head on average.
        floor: entries that every head keeps at least.
    Returns:
        Bool [S, H, N].
    """
    exists = scores > -torch.inf
    if floor > 0:
        scores = scores.masked_fill(keep_top(scores, floor), torch.inf)
    return keep_top(scores.flatten(1), count * scores.shape[1]).view_as(scores) & exists


def rounded_cumulatively(shares: Sequence[Fraction]) -> list[int]:
    """Round so that every partial sum is the rounded partial sum, half to even: the total is exact."""
    total, ends = Fraction(0), [0]
    for share in shares:
        total += share
        ends.append(round(total))
    return [end - begin for begin, end in itertools.pairwise(ends)]


def in_proportion(weights: Sequence[float], total: float, cap: int) -> list[int]:
    """Divide `total` in proportion to weights, at most `cap` each (water-filling), rounded down.

    What a capped share leaves goes to the uncapped ones in proportion; weights that are all 0 count as equal.
    """
    shares = [0.0] * len(weights)
    open_ = list(range(len(weights)))
    while open_:
        weight = math.fsum(weights[i] for i in open_)
        for i in open_:
            shares[i] = total * (weights[i] / weight if weight > 0 else 1 / len(open_))
        full = [i for i in open_ if shares[i] >= cap]
        if not full:
            break
        for i in full:
            shares[i] = float(cap)
            total -= cap
            open_.remove(i)
    return [math.floor(share) for share in shares]
