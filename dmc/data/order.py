"""The order in which samples are drawn, of one text or of a blend: a pure function of (seed, position) that resumes.

The *position* of a sample is its number in the global sequence of draws, 0 .. num_draws - 1, the same whatever the
world size, the workers or the restarts. The sampler yields positions; the dataset turns a position into an item and
puts the position in it, so that noise can be keyed by it:

    order = ResumableOrder.over(dataset, seed, num_draws=steps * batch_size, start=consumed, rank=rank, world_size=size)
    loader = DataLoader(OrderedDataset(dataset, order), sampler=order, batch_size=batch_size // size)
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Sampler

from dmc.data.packing import PackedTokens

_MAX_PERIOD = 2**16
_MASK = 2**64 - 1
_NUM_ROUNDS = 6  # even, so that the two halves end with the widths they began with


def _mix(value: int) -> int:
    """Scramble 64 bits (the splitmix64 finalizer)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def shuffled_index(offset: int, num_samples: int, *keys: int) -> int:
    """Return the element at `offset` of the permutation of range(num_samples) that `keys` selects.

    A Feistel network over the next power of two, applied again while it lands outside the range (cycle walking):
    no array of `num_samples` per epoch and worker, and no dependence on the version of a library's generator.

    Args:
        offset: index in the permutation, 0 <= offset < num_samples.
        num_samples: length of the permutation.
        keys: integers that select the permutation, for instance seed and epoch.
    """
    key = 0
    for part in keys:
        key = _mix(key ^ (part & _MASK))
    bits = max(2, (num_samples - 1).bit_length())
    index = offset
    while True:
        left_bits, right_bits = bits - bits // 2, bits // 2
        left, right = index >> right_bits, index & ((1 << right_bits) - 1)
        for step in range(_NUM_ROUNDS):
            scrambled = _mix(key ^ right ^ (step << 60)) & ((1 << left_bits) - 1)
            left, right = right, left ^ scrambled
            left_bits, right_bits = right_bits, left_bits
        index = (left << right_bits) | right
        if index < num_samples:
            return index


@dataclass(frozen=True)
class ResumableOrder(Sampler[int]):
    """Yields the global draw positions of one rank, from any position on, at any world size.

    The global order is endless: one seeded permutation of the dataset per epoch, epoch after epoch. Rank r draws
    positions start + r, start + r + world_size, ...; resuming is `start` = samples consumed so far by all ranks.
    Draws that do not fill a last round of all ranks are dropped, so every rank yields equally many.
    """

    num_samples: int | None
    """Length of the dataset; None: an endless dataset, which is read in its own order."""
    seed: int
    """Selects the permutations."""
    num_draws: int
    """Samples drawn over the whole training by all ranks."""
    start: int = 0
    """First position drawn."""
    rank: int = 0
    world_size: int = 1
    """Processes that share the draws."""

    @classmethod
    def over(cls, dataset: Dataset[dict[str, Any]], seed: int, **options: Any) -> ResumableOrder:
        """Build the order for a dataset: shuffled epochs if it has a length, its own order if it is endless."""
        return cls(len(dataset) if isinstance(dataset, Sized) else None, seed, **options)

    def index_at(self, position: int) -> int:
        """Return the dataset index drawn at a global position."""
        if self.num_samples is None:
            return position
        epoch, offset = divmod(position, self.num_samples)
        return shuffled_index(offset, self.num_samples, self.seed, epoch)

    def __iter__(self) -> Iterator[int]:
        num_rounds = (self.num_draws - self.start) // self.world_size
        first = self.start + self.rank
        return iter(range(first, first + num_rounds * self.world_size, self.world_size))

    def __len__(self) -> int:
        """Return this rank's draws from position 0, whatever `start` is: Lightning resumes its own batch counter."""
        return self.num_draws // self.world_size


class OrderedDataset(Dataset[dict[str, Any]]):
    """Maps a global draw position to its item and adds `"position": int` to it."""

    def __init__(self, dataset: Dataset[dict[str, Any]], order: ResumableOrder) -> None:
        self.dataset, self.order = dataset, order

    def __len__(self) -> int:
        return self.order.num_draws

    def __getitem__(self, position: int) -> dict[str, Any]:
        return {**self.dataset[self.order.index_at(position)], "position": position}


def integer_shares(weights: Sequence[float]) -> list[int]:
    """Turn weights into the smallest integers in the same proportion: [0.7, 0.3] -> [7, 3].

    Weights are read as the decimals they are written as. Where the exact integers would add up to more than 65536, they
    are rounded to sum to about that, which shifts a share by at most 1e-5 of the blend.
    """
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

    Args:
        datasets: the sources, none of them empty.
        weights: relative number of samples drawn from each source, > 0; they need not sum to 1.
        seed: selects the permutations.
    """

    def __init__(self, datasets: Sequence[PackedTokens], weights: Sequence[float], seed: int = 0) -> None:
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
