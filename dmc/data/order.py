"""The order in which training samples are drawn: a pure function of (seed, position), so any run resumes anywhere.

The *position* of a sample is its number in the global sequence of draws, 0 .. num_draws - 1, the same whatever the
world size, the workers or the restarts. The sampler yields positions; the dataset turns a position into an item and
puts the position in it, so that noise can be keyed by it:

    order = ResumableOrder.over(dataset, seed, num_draws=steps * batch_size, start=consumed, rank=rank, world_size=size)
    loader = DataLoader(OrderedDataset(dataset, order), sampler=order, batch_size=batch_size // size)
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, Sampler

_MASK = 2**64 - 1
_NUM_ROUNDS = 6  # even, so that the two halves end with the widths they began with


def _mix(value: int) -> int:
    """Scramble 64 bits (the splitmix64 finaliser)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def shuffled_index(offset: int, num_samples: int, *keys: int) -> int:
    """Return the element at `offset` of the permutation of range(num_samples) that `keys` selects.

    A Feistel network over the next power of two, applied again while it lands outside the range (cycle walking):
    no array of `num_samples` per epoch and worker, and no dependence on the version of a library's generator.

    Args:
        offset: place in the permutation, 0 <= offset < num_samples.
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
    """Length of the dataset; None: an endless dataset with an order of its own (`Blend`), which is read in that."""
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
