"""The order in which samples are drawn, of one text or of a blend: a function of (seed, position), to resume anywhere.

The *position* of a sample is its number in the global sequence of draws, 0 .. num_draws - 1, the same whatever the
ranks, workers or restarts. A training dataset is endless: it makes an item of any position, and puts the position in
it, so that noise can be keyed by it:

    dataset = Shuffled(packed, seed)  # or a `Blend`, or `FactSequences`
    sampler = Positions(num_draws=steps * batch_size, start=consumed, rank=rank, world_size=size)
    loader = DataLoader(dataset, sampler=sampler, batch_size=batch_size // size)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Sampler

_PERIOD = 10_000  # samples in which a blend holds its weights


@dataclass(frozen=True)
class Positions(Sampler[int]):
    """Yields the positions of one rank: start + rank, start + rank + world_size, ...

    Resuming is `start` = samples consumed so far by all ranks. Draws that do not fill a last round of all ranks are
    dropped, so every rank yields equally many.
    """

    num_draws: int
    """Samples drawn over the whole training by all ranks."""
    start: int = 0
    """First position drawn."""
    rank: int = 0
    world_size: int = 1
    """Processes that share the draws."""

    def __iter__(self) -> Iterator[int]:
        num_rounds = (self.num_draws - self.start) // self.world_size
        first = self.start + self.rank
        return iter(range(first, first + num_rounds * self.world_size, self.world_size))

    def __len__(self) -> int:
        """Return this rank's draws from position 0, whatever `start` is: Lightning resumes its own batch counter."""
        return self.num_draws // self.world_size


class Shuffled(Dataset[dict[str, Any]]):
    """Draws from a dataset in one seeded permutation per epoch, epoch after epoch; an integer of memory per sample.

    Args:
        dataset: map-style, not empty.
        keys: integers that select the permutations, such as the seed.
    """

    def __init__(self, dataset: Any, *keys: int) -> None:
        self.dataset, self.keys = dataset, keys
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int64)

    def __getitem__(self, position: int) -> dict[str, Any]:
        return {**self.dataset[self.index_at(position)], "position": position}

    def index_at(self, position: int) -> int:
        """Return the index drawn at a position."""
        epoch, offset = divmod(position, len(self.dataset))
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = np.random.default_rng([*self.keys, epoch]).permutation(len(self.dataset))
        return int(self._permutation[offset])


class Blend(Dataset[dict[str, Any]]):
    """Draws from several map-style datasets in fixed proportions.

    A seeded schedule of 10,000 draws, repeated, says which source is drawn at a position; each source is `Shuffled`. An
    item has its number as "source".

    Args:
        datasets: the sources, none of them empty.
        weights: relative number of samples drawn from each source, > 0; they need not sum to 1.
        seed: selects the schedule and the permutations.
    """

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float], seed: int = 0) -> None:
        self.datasets = list(datasets)
        self._shuffled = [Shuffled(dataset, seed, source) for source, dataset in enumerate(datasets)]
        self._schedule = blend_schedule(weights, seed)
        self._shares = np.bincount(self._schedule)
        self._count_before = np.empty(len(self._schedule), dtype=np.int64)  # draws of the same source before it
        for source, share in enumerate(self._shares):
            self._count_before[self._schedule == source] = np.arange(share)

    def __getitem__(self, position: int) -> dict[str, Any]:
        period, place = divmod(position, len(self._schedule))
        source = int(self._schedule[place])
        draw = period * int(self._shares[source]) + int(self._count_before[place])
        return {**self._shuffled[source][draw], "source": source, "position": position}


def blend_schedule(weights: Sequence[float], seed: int) -> np.ndarray:
    """Return the source of each draw, int64: as many as their weights say, to 1 in 10,000, in a seeded order."""
    shares = np.maximum(1, np.round(np.array(weights) / sum(weights) * _PERIOD)).astype(int)
    # numpy pads a seed with zeros, so 5 is [5, 0, 0], the first order of source 0; spawn keys are apart from seeds.
    generator = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0,)))
    return generator.permutation(np.repeat(np.arange(len(shares)), shares))
