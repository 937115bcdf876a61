"""The order in which samples are drawn, of one text or of a blend: a pure function of (seed, position) that resumes.

The *position* of a sample is its number in the global sequence of draws, 0 .. num_draws - 1, the same whatever the
world size, the workers or the restarts. The sampler yields positions; the dataset turns a position into an item and
puts the position in it, so that noise can be keyed by it:

    order = ResumableOrder.over(dataset, seed, num_draws=steps * batch_size, start=consumed, rank=rank, world_size=size)
    loader = DataLoader(OrderedDataset(dataset, order), sampler=order, batch_size=batch_size // size)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Sampler

from dmc.data.packing import PackedTokens

_PERIOD = 10_000  # samples in which a blend holds its weights


class Shuffle:
    """One seeded permutation of range(num_samples) after the other; an integer of memory for each sample.

    Args:
        num_samples: length of the permutations.
        keys: integers that select them, such as the seed.
    """

    def __init__(self, num_samples: int, *keys: int) -> None:
        self.num_samples, self.keys = num_samples, keys
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __call__(self, draw: int) -> int:
        """Return the index drawn after `draw` others."""
        epoch, offset = divmod(draw, self.num_samples)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([*self.keys, epoch]).permutation(self.num_samples)
        return int(self._order[offset])


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

    @cached_property
    def _shuffle(self) -> Shuffle:
        return Shuffle(self.num_samples or 0, self.seed)

    @classmethod
    def over(cls, dataset: Dataset[dict[str, Any]], seed: int, **options: Any) -> ResumableOrder:
        """Build the order for a dataset: shuffled epochs if it has a length, its own order if it is endless."""
        return cls(len(dataset) if isinstance(dataset, Sized) else None, seed, **options)

    def index_at(self, position: int) -> int:
        """Return the dataset index drawn at a global position."""
        return position if self.num_samples is None else self._shuffle(position)

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


class Blend(Dataset[dict[str, Any]]):
    """Draws from several map-style datasets in fixed proportions; endless, so it has no length.

    Item p is a pure function of (seed, p): a seeded schedule of 10,000 draws, repeated, says which source, and the
    source is read in one fresh permutation per epoch of its own. It adds `"source": int` to the source's item. It is
    in random order already: read it through `ResumableOrder.over`, which leaves that order as it is.

    Args:
        datasets: the sources, none of them empty.
        weights: relative number of samples drawn from each source, > 0; they need not sum to 1.
        seed: selects the schedule and the permutations.
    """

    def __init__(self, datasets: Sequence[PackedTokens], weights: Sequence[float], seed: int = 0) -> None:
        self.datasets, self.seed = list(datasets), seed
        self._schedule = blend_schedule(weights, seed)
        self._shares = np.bincount(self._schedule)
        self._count_before = np.empty(len(self._schedule), dtype=np.int64)  # samples of the slot's source before it
        for source, share in enumerate(self._shares):
            self._count_before[self._schedule == source] = np.arange(share)
        self._shuffles = [Shuffle(len(each), seed, source) for source, each in enumerate(self.datasets)]

    def __getitem__(self, position: int) -> dict[str, Any]:
        period, slot = divmod(position, len(self._schedule))
        source = int(self._schedule[slot])
        draw = period * int(self._shares[source]) + int(self._count_before[slot])
        return {**self.datasets[source][self._shuffles[source](draw)], "source": source}


def blend_schedule(weights: Sequence[float], seed: int) -> np.ndarray:
    """Return the source of each draw, int64: as many as their weights say, to 1 in 10,000, in a seeded order."""
    shares = np.maximum(1, np.round(np.array(weights) / sum(weights) * _PERIOD)).astype(int)
    # numpy pads a seed with zeros, so 5 is [5, 0, 0], the first order of source 0; spawn keys are apart from seeds.
    generator = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0,)))
    return generator.permutation(np.repeat(np.arange(len(shares)), shares))
