"""Policies that keep every entry and read a part of the cache, and helpers that choose the part.

A part is read without a copy: a kernel can view pages as a pool of smaller pages (`small_pages`).
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from dmc.kernels import choose_backend
from dmc.kernels.layout import CacheLayout
from dmc.policies.base import CachePolicy


class ReadingPolicy(CachePolicy):
    """Holds every entry; a generated token's query reads some of them. A method is a frozen dataclass."""


def top_positions(scores: Tensor, counts: Tensor, most: int) -> Tensor:
    """Find the highest scores of the last dimension, in ascending order; of equal ones the first count.

    Args:
        scores: [..., N], at least `counts` of them above -inf.
        counts: number of scores to find, int64 [...], 0 to N.
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
    rank = (chosen.cumsum(-1) - 1).where(chosen, most)  # unchosen ones go into an extra column
    position = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
    found = torch.zeros(*scores.shape[:-1], most + 1, dtype=torch.long, device=scores.device)
    return found.scatter(-1, rank, position)[..., :most]


def backend_for_pages(backend: ModuleType, layout: CacheLayout, page_size: int) -> ModuleType:
    """Return the backend if it serves pages of this size (flash-attn 2 may not), else the best one that does."""
    if backend.supports(layout.dtype, layout.head_dim, page_size, layout.device) is None:
        return backend
    return choose_backend("auto", layout.dtype, layout.head_dim, page_size, layout.device)


def with_tail(chosen: Tensor, counts: Tensor, begins: Tensor, ends: Tensor, width: int) -> Tensor:
    """Append positions begin..end-1 of each sequence to the chosen ones.

    Args:
        chosen: int64 [S, k].
        counts: number of chosen positions, [S].
        begins: first position to append, [S].
        ends: end of the positions to append, [S].
        width: a bound on the total number.
    Returns:
        int64 [S, width]; the last position again and again beyond the end.
    """
    column = torch.arange(width, device=chosen.device)
    missing = width - chosen.shape[1]
    chosen = torch.nn.functional.pad(chosen, (0, missing)) if missing > 0 else chosen[:, :width]
    tail = (column - (counts - begins)[:, None]).clamp_max((ends - 1)[:, None])
    return chosen.where(column < counts[:, None], tail)
