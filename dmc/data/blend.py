"""A weighted blend of datasets with exact proportions."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from dmc.data.order import shuffled_index
from dmc.data.packing import PackedTokens

_MAX_PERIOD = 2**16


def integer_shares(weights: Sequence[float]) -> list[int]:
    """Turn weights into the smallest integers in the same proportion: [0.7, 0.3] -> [7, 3].

    Weights are read as the decimals they are written as. Where the exact integers would add up to more than 65536, they
    are rounded to sum to about that, which shifts a share by at most 1e-5 of the blend.

    Raises:
        ValueError: a weight is not a finite number > 0.
    """
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"weight={weight} must be a finite number > 0; leave the source out to give it no share.")
    fractions = [Fraction(repr(float(weight))) for weight in weights]
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    shares = [int(fraction * denominator) for fraction in fractions]
    divisor = math.gcd(*shares)
    shares = [share // divisor for share in shares]
    if sum(shares) > _MAX_PERIOD:
        total = sum(shares)
        shares = [max(1, round(Fraction(share * _MAX_PERIOD, total))) for share in shares]
    return shares


def blend_schedule(shares: Sequence[int]) -> np.ndarray:
    """Order one period of a blend so that every prefix holds each source's proportion to within one sample.

    Sample j of a source with share a, in a period of A = sum of shares, belongs in slots [floor(j A / a),
    ceil((j + 1) A / a)); earliest deadline first meets all these windows (Tijdeman's chairman assignment). The simpler
    rule, largest deficit first, can miss them when there are many sources.

    Args:
        shares: samples of each source in one period, >= 1.
    Returns:
        The source of each slot, int32 [sum(shares)].
    """
    period = sum(shares)
    waiting = [(0, source, 0) for source in range(len(shares))]  # (release, source, sample)
    ready: list[tuple[int, int, int]] = []  # (deadline, source, sample)
    schedule = np.empty(period, dtype=np.int32)
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            _, source, sample = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(sample + 1) * period // shares[source]), source, sample))
        _, source, sample = heapq.heappop(ready)
        schedule[slot] = source
        if sample + 1 < shares[source]:
            heapq.heappush(waiting, ((sample + 1) * period // shares[source], source, sample + 1))
    return schedule


class Blend(Dataset[dict[str, Any]]):
    """Draws from several map-style datasets in fixed proportions; endless, so it has no length.

    Item p is a pure function of (seed, p): the schedule says which source, and the source is read in one fresh
    permutation per epoch of its own. It adds `"source": int` to the source's item. It is in random order already: read
    it through `ResumableOrder.over`, which leaves that order as it is.
    """

    def __init__(self, datasets: Sequence[PackedTokens], weights: Sequence[float], seed: int = 0) -> None:
        """Compute the schedule.

        Args:
            datasets: the sources, none of them empty.
            weights: relative number of samples drawn from each source, > 0; they need not sum to 1.
            seed: selects the permutations.
        """
        self.datasets = list(datasets)
        self.lengths = [len(each) for each in datasets]
        self.seed = seed
        self.shares = integer_shares(weights)
        self._schedule = blend_schedule(self.shares)
        self._count_before = np.empty(len(self._schedule), dtype=np.int64)  # samples of the slot's source before it
        for source, share in enumerate(self.shares):
            self._count_before[self._schedule == source] = np.arange(share)

    def locate(self, position: int) -> tuple[int, int]:
        """Return the source of a position and how many samples of that source were drawn before it."""
        period, slot = divmod(position, len(self._schedule))
        source = int(self._schedule[slot])
        return source, period * self.shares[source] + int(self._count_before[slot])

    def draws_of_each(self, num_draws: int) -> list[int]:
        """Return how many of the first `num_draws` samples come from each source."""
        periods, rest = divmod(num_draws, len(self._schedule))
        counts = np.bincount(self._schedule[:rest], minlength=len(self.shares)).tolist()
        return [periods * share + count for share, count in zip(self.shares, counts, strict=True)]

    def __getitem__(self, position: int) -> dict[str, Any]:
        source, draw = self.locate(position)
        epoch, offset = divmod(draw, self.lengths[source])
        index = shuffled_index(offset, self.lengths[source], self.seed, source, epoch)
        return {**self.datasets[source][index], "source": source}
