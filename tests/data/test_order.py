from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from dmc.data import Blend, OrderedDataset, PackedTokens, ResumableOrder
from dmc.data.order import shuffled_index
from dmc.data.packing import TokenChunk, TokenTable


def make_dataset(num_sequences: int) -> PackedTokens:
    token_ids = np.arange(num_sequences * 4, dtype=np.int32)
    return PackedTokens(TokenTable(lambda: [TokenChunk(token_ids, np.array([len(token_ids)]))]), 4)


@given(st.integers(1, 300), st.integers(-(2**70), 2**70), st.integers(0, 10))
def test_shuffled_index_is_a_permutation(num_samples: int, seed: int, epoch: int) -> None:
    indices = [shuffled_index(offset, num_samples, seed, epoch) for offset in range(num_samples)]
    assert sorted(indices) == list(range(num_samples))


@pytest.mark.parametrize("num_samples", [2, 3, 5, 8, 13])
def test_every_element_is_equally_likely_at_every_offset(num_samples: int) -> None:
    num_seeds = 2000
    for offset in range(num_samples):
        counts = Counter(shuffled_index(offset, num_samples, seed, 0) for seed in range(num_seeds))
        expected = num_seeds / num_samples
        chi_square = sum((counts[index] - expected) ** 2 / expected for index in range(num_samples))
        assert chi_square < 3 * (num_samples - 1) + 12


def test_neighbours_land_apart() -> None:
    num_samples = 10_000
    indices = np.array([shuffled_index(offset, num_samples, 1, 0) for offset in range(num_samples)])
    correlation = np.corrcoef(indices[:-1], indices[1:])[0, 1]
    assert abs(correlation) < 0.05
    assert abs(np.abs(np.diff(indices)).mean() / num_samples - 1 / 3) < 0.02


def test_order_of_a_seed_never_changes() -> None:
    """A checkpoint resumed by a later version must go on in the same order."""
    assert [shuffled_index(offset, 10, 0, 0) for offset in range(10)] == [0, 6, 5, 2, 1, 9, 4, 3, 8, 7]


@settings(deadline=None)
@given(
    num_samples=st.integers(1, 40),
    num_draws=st.integers(12, 200),
    first_size=st.integers(1, 6),
    second_size=st.integers(1, 6),
    data=st.data(),
)
def test_resuming_at_any_position_and_world_size_continues_the_global_order(
    num_samples: int, num_draws: int, first_size: int, second_size: int, data: st.DataObject
) -> None:
    def global_order(start: int, stop: int, world_size: int) -> list[int]:
        ranks = [
            list(ResumableOrder(num_samples, 3, num_draws=stop, start=start, rank=rank, world_size=world_size))
            for rank in range(world_size)
        ]
        assert len({len(rank) for rank in ranks}) == 1
        return [position for draw in zip(*ranks, strict=True) for position in draw]

    num_rounds = data.draw(st.integers(0, num_draws // first_size))
    consumed = num_rounds * first_size
    before = global_order(0, num_draws, first_size)[:consumed]
    after = global_order(consumed, num_draws, second_size)
    positions = before + after
    assert positions == list(range(len(positions)))
    assert num_draws - len(positions) < second_size

    order = ResumableOrder(num_samples, 3, num_draws=num_draws)
    for epoch in range(num_draws // num_samples):
        indices = [order.index_at(epoch * num_samples + offset) for offset in range(num_samples)]
        assert sorted(indices) == list(range(num_samples))


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    first, second = (ResumableOrder(50, seed, num_draws=100) for seed in (0, 1))
    epochs = [
        [order.index_at(start + offset) for offset in range(50)] for order in (first, second) for start in (0, 50)
    ]
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_length_counts_from_position_zero() -> None:
    order = ResumableOrder(10, 0, num_draws=23, start=12, rank=1, world_size=4)
    assert len(order) == 5
    assert list(order) == [13, 17]


def collect(dataset: OrderedDataset, num_workers: int, batch_size: int) -> list[torch.Tensor]:
    loader = DataLoader(dataset, batch_size=batch_size, sampler=dataset.order, num_workers=num_workers)
    batches = list(loader)
    return [torch.cat([batch[name].reshape(len(batch["position"]), -1) for batch in batches]) for name in KEYS]


KEYS = ("input_ids", "index", "position")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("blended", [False, True])
def test_resumed_loader_yields_what_the_uninterrupted_one_would(num_workers: int, blended: bool) -> None:
    dataset = Blend([make_dataset(7), make_dataset(5)], [0.7, 0.3], seed=5) if blended else make_dataset(7)
    whole = collect(OrderedDataset(dataset, ResumableOrder.over(dataset, 5, num_draws=40)), 0, 4)
    ranks = [
        collect(
            OrderedDataset(dataset, ResumableOrder.over(dataset, 5, num_draws=40, start=16, rank=rank, world_size=2)),
            num_workers,
            3,
        )
        for rank in range(2)
    ]
    for expected, *parts in zip(whole, *ranks, strict=True):
        assert torch.equal(torch.stack(parts, dim=1).flatten(0, 1), expected[16:])


def test_item_carries_its_position() -> None:
    dataset = make_dataset(6)
    ordered = OrderedDataset(dataset, ResumableOrder.over(dataset, 2, num_draws=30))
    assert len(ordered) == 30
    for position in range(30):
        item = ordered[position]
        assert item["position"] == position
        assert item["index"] == ordered.order.index_at(position)
        assert item["input_ids"].tolist() == [4 * item["index"] + place for place in range(4)]
