"""How many entries each layer and head keeps, and which: exact totals, ties to the smaller head and position."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from dmc.budget import ROUNDING, Budget, rounded_down

Decay = Literal["linear", "geometric", "exponential"]


def effective_window(window: int, limit: int) -> int:
    """Limit an observation window to half of the budget, but at least 1."""
    used = min(window, max(1, limit // 2))
    if used < window:
        warn_once(
            f"window={window} is more than half of a budget of {limit} entries per head: a window of {used} is used"
        )
    return used


@functools.cache
def warn_once(message: str) -> None:
    """Warn with each message only once."""
    warnings.warn(message, stacklevel=2)


def entries_allowed(budget: Budget, num_tokens: Tensor) -> Tensor:
    """Compute `Budget.entries` on the device of the numbers of tokens, int64 [S]."""
    if budget.tokens is not None:
        return torch.full_like(num_tokens, budget.tokens)
    assert budget.ratio is not None
    return (num_tokens.double() / budget.ratio + ROUNDING).floor().long().clamp_min(1)


def keep_top(scores: Tensor, count: int | Tensor) -> Tensor:
    """Mark the `count` highest of the last dimension; of equal ones the first.

    Args:
        scores: [..., N], -inf where there is no entry.
        count: a number or a tensor that fits [..., 1]; fewer are marked where fewer are above -inf.
    Returns:
        Bool, shape of `scores`.
    """
    size, exists = scores.shape[-1], scores > -torch.inf
    if isinstance(count, int):
        if not 0 < count < size:
            return exists & (count > 0)
        cut = scores.topk(count, dim=-1).values[..., -1:]
    else:
        place = (count.clamp(1, size) - 1).expand(*scores.shape[:-1], 1)
        cut = scores.sort(dim=-1, descending=True).values.gather(-1, place)
    above, equal = scores > cut, scores == cut
    missing = count - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= missing))) & exists


def keep_pooled(scores: Tensor, count: int, floor: int = 0) -> Tensor:
    """Mark the `count * H` highest over all heads of a layer (AdaKV), every head its own top `floor` among them.

    Args:
        scores: [S, H, N], -inf where there is no entry; no head has more than `floor` entries at +inf.
        count: entries per head on average.
        floor: entries that every head keeps at least.
    Returns:
        Bool [S, H, N].
    """
    exists = scores > -torch.inf
    if floor > 0:
        scores = scores.masked_fill(keep_top(scores, floor), torch.inf)
    return keep_top(scores.flatten(1), count * scores.shape[1]).view_as(scores) & exists


def rounded_cumulatively(shares: Sequence[Fraction | float]) -> list[int]:
    """Round shares so that every partial sum is the rounded partial sum, half to even: the total is exact."""
    ends = [0, *(round(end) for end in itertools.accumulate(shares))]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def in_proportion(weights: Sequence[float], total: float, cap: float | Sequence[float]) -> list[float]:
    """Divide `total` in proportion to weights, at most `cap` each (water-filling), one for all or one for each.

    The excess of a capped share goes to the uncapped ones in proportion; weights that are all 0 count as equal.
    """
    shares = [0.0] * len(weights)
    caps = cap if isinstance(cap, Sequence) else [cap] * len(weights)
    open_ = list(range(len(weights)))
    while open_:
        weight = math.fsum(weights[i] for i in open_)
        for i in open_:
            shares[i] = total * (weights[i] / weight if weight > 0 else 1 / len(open_))
        full = [i for i in open_ if shares[i] >= caps[i]]
        if not full:
            break
        for i in full:
            shares[i] = caps[i]
            total -= caps[i]
            open_.remove(i)
    return shares


def pyramid(average: int, num_layers: int, beta: float, candidates: int, decay: Decay = "linear") -> list[int]:
    """Give the first layers most and the last fewest (PyramidKV, eq. 1), `average * num_layers` in all.

    linear: the last layer gets average / beta, each earlier layer the same number more. geometric: layers differ by
    equal factors, and the first has 2 beta - 1 times the last. exponential: each layer gets average / beta, and the
    rest is shared in proportion to exp(-layer). The latter two pass what exceeds the candidates to the other layers.

    Args:
        average: entries per head.
        num_layers: layers of the model.
        beta: steepness, >= 1; 1 is flat.
        candidates: entries per head to choose from; if twice the average exceeds them, all layers get the same.
        decay: see above.
    """
    if num_layers == 1 or 2 * average > candidates:
        return [average] * num_layers
    last = Fraction(average) / Fraction(beta)
    first, layers = 2 * average - last, range(num_layers)
    shares: Sequence[Fraction | float]
    if decay == "linear":
        shares = [first - (first - last) / (num_layers - 1) * index for index in layers]
    elif decay == "geometric":
        weights = [(2 * beta - 1) ** (-index / (num_layers - 1)) for index in layers]
        shares = in_proportion(weights, num_layers * average, candidates)
    else:
        rest, weights = float(average - last), [math.exp(-index) for index in layers]
        shares = [float(last) + share for share in in_proportion(weights, num_layers * rest, candidates - float(last))]
    return rounded_cumulatively(shares)


def spread_evenly(shares: Sequence[int], total: int, cap: int | Sequence[int]) -> list[int]:
    """Cap shares, and spread the rest of `total` evenly over uncapped ones, the remainder to the first."""
    caps = cap if isinstance(cap, Sequence) else [cap] * len(shares)
    filled = [min(share, most) for share, most in zip(shares, caps, strict=True)]
    while (missing := total - sum(filled)) > 0 and (open_ := [i for i, share in enumerate(filled) if share < caps[i]]):
        added, more = divmod(missing, len(open_))
        for order, i in enumerate(open_):
            filled[i] = min(filled[i] + added + (order < more), caps[i])
    return filled


def mean_held(held: Sequence[Sequence[int]]) -> list[int]:
    """Average what the heads of each layer hold, rounded up."""
    return [-(-sum(heads) // len(heads)) for heads in held]


def within(budgets: Sequence[int], held: Sequence[int]) -> list[int]:
    """Cap each layer's budget at what it holds, and share the excess among the others; the total stays.

    Budget that no layer can use is room for tokens to come, the same for every layer.
    """
    if all(budget <= most for budget, most in zip(budgets, held, strict=True)):
        return list(budgets)
    total = sum(budgets)
    shares = [rounded_down(share) for share in in_proportion(budgets, total, held)]
    return spread_evenly(spread_evenly(shares, total, held), total, total)


def stepped_down(average: int, num_layers: int, beta: float, candidates: int) -> list[int]:
    """The linear pyramid as PyramidKV's code rounds it: the sum exceeds `average * num_layers`."""
    if num_layers == 1 or 2 * average > candidates:
        return [average] * num_layers
    last = int(average // beta)
    first = 2 * average - last
    step = (first - last) // (num_layers - 1)
    return [first - step * index for index in range(num_layers)]
