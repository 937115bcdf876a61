"""Policies that drop nothing and read part of the cache, and how they choose it."""

from __future__ import annotations

import torch
from torch import Tensor

from dmc.policies.base import CachePolicy


class ReadingPolicy(CachePolicy):
    """Holds every entry; a generated token's query reads some of them. A method is a frozen dataclass."""


def top_positions(scores: Tensor, counts: Tensor, most: int) -> Tensor:
    """Find the highest scores of the last dimension, in ascending order; of equal ones the first count.

    Args:
        scores: [..., N], as many above -inf as are to be found.
        counts: how many, int64 [...], 0 to N.
        most: a bound on `counts`, at least 1.
    Returns:
        int64 [..., min(most, N)]; 0 beyond the count.
    """
    most = min(most, scores.shape[-1])
    counts = counts[..., None]
    cut = scores.topk(most, dim=-1).values.gather(-1, (counts - 1).clamp_min(0))
    above, equal = scores > cut, scores == cut
    missing = counts - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= missing))
    rank = (chosen.cumsum(-1) - 1).where(chosen, most)  # what is not chosen goes into a column of its own
    position = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
    found = torch.zeros(*scores.shape[:-1], most + 1, dtype=torch.long, device=scores.device)
    return found.scatter(-1, rank, position)[..., :most]
