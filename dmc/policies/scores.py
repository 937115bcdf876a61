"""Pooling of scores over neighboring entries, and the choice of the highest over the heads of a layer."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from dmc.policies.base import Entries
from dmc.policies.budgets import keep_pooled

Pooling = Literal["max", "avg"]


def check_odd(kernel_size: int) -> None:
    """Refuse a pooling that cannot be centered on an entry."""
    if kernel_size % 2 == 0:
        raise ValueError(f"kernel_size={kernel_size}: expected an odd number, such as 7")


def pool(scores: Tensor, kernel_size: int, pooling: Pooling) -> Tensor:
    """Replace each score by the maximum or the mean of its neighborhood along the last dimension.

    Beyond the ends the maximum ignores, the mean counts zeros and still divides by the kernel, as the authors do.

    Args:
        scores: [..., entries].
        kernel_size: entries of a neighborhood, odd.
        pooling: "max" or "avg".
    Returns:
        Shape of `scores`.
    """
    flat = scores.reshape(-1, 1, scores.shape[-1])
    if pooling == "max":
        pooled = torch.nn.functional.max_pool1d(flat, kernel_size, stride=1, padding=kernel_size // 2)
    else:
        pooled = torch.nn.functional.avg_pool1d(flat, kernel_size, stride=1, padding=kernel_size // 2)
    return pooled.view(scores.shape)


def pool_before(entries: Entries, scores: Tensor, window: int | Tensor, kernel_size: int, pooling: Pooling) -> Tensor:
    """Pool the scores of the entries before each head's last `window` (number or [S]), whose own scores become +inf.

    Args:
        entries: the entries that the scores are of.
        scores: [S, H, N].
        window: number of last entries, which always stay.
        kernel_size: odd.
        pooling: max or avg.
    """
    last = entries.among_last(window)
    nothing = -torch.inf if pooling == "max" else 0.0
    scores = entries.in_order(scores.masked_fill(last | ~entries.exists, nothing))
    return entries.by_slot(pool(scores, kernel_size, pooling)).masked_fill(last, torch.inf)


def keep_over_heads(entries: Entries, budget: int, share: float, num_safe: int) -> Tensor:
    """Choose by `Entries.observed` over all heads (AdaKV), bool [S, H, N].

    Args:
        entries: entries of one layer.
        budget: entries per head that stay, on average.
        share: share of its budget beside `num_safe` that every head keeps.
        num_safe: entries of a head that are at +inf.
    """
    assert entries.observed is not None
    scores = entries.in_order(entries.guarded(entries.observed).masked_fill(~entries.exists, -torch.inf))
    return entries.by_slot(keep_pooled(scores, budget, num_safe + math.floor(share * (budget - num_safe))))
