import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from dmc.data import Blend, OrderedDataset, PackedTokens, ResumableOrder
from dmc.data.order import Shuffle, blend_schedule
from dmc.data.packing import TokenArrays, TokenTable


def make_dataset(num_sequences, length=4, first_token=0):
    token_ids = np.arange(first_token, first_token + num_sequences * length, dtype=np.int32)
    arrays = TokenArrays(pa.chunked_array([token_ids]), np.array([len(token_ids)]))
    return PackedTokens(TokenTable(lambda: arrays), length)


@given(st.integers(1, 300), st.integers(0, 2**32 - 1), st.integers(0, 10))
def test_every_epoch_is_a_permutation(num_samples, seed, epoch):
    shuffle = Shuffle(num_samples, seed)
    assert sorted(shuffle(epoch * num_samples + offset) for offset in range(num_samples)) == list(range(num_samples))


def test_order_of_a_seed_is_known():
    """A run resumed elsewhere goes on in the same order."""
    assert [Shuffle(10, 0)(draw) for draw in range(10)] == [4, 6, 2, 7, 3, 5, 9, 0, 8, 1]


@settings(deadline=None)
@given(
    num_samples=st.integers(1, 40),
    num_draws=st.integers(12, 200),
    first_size=st.integers(1, 6),
    second_size=st.integers(1, 6),
    data=st.data(),
)
def test_resuming_at_any_position_and_world_size_continues_the_global_order(
    num_samples, num_draws, first_size, second_size, data
):
    def global_order(start, stop, world_size):
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


def test_epochs_and_seeds_are_shuffled_differently():
    first, second = (ResumableOrder(50, seed, num_draws=100) for seed in (0, 1))
    epochs = [
        [order.index_at(start + offset) for offset in range(50)] for order in (first, second) for start in (0, 50)
    ]
    assert len({tuple(epoch) for epoch in epochs}) == 4


def collect(dataset, num_workers, batch_size):
    loader = DataLoader(dataset, batch_size=batch_size, sampler=dataset.order, num_workers=num_workers)
    batches = list(loader)
    return [torch.cat([batch[name].reshape(len(batch["position"]), -1) for batch in batches]) for name in KEYS]


KEYS = ("input_ids", "index", "position")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("blended", [False, True])
def test_resumed_loader_yields_what_the_uninterrupted_one_would(num_workers, blended):
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


def test_item_carries_its_position():
    dataset = make_dataset(6)
    ordered = OrderedDataset(dataset, ResumableOrder.over(dataset, 2, num_draws=30))
    assert len(ordered) == 30
    for position in range(30):
        item = ordered[position]
        assert item["position"] == position
        assert item["index"] == ordered.order.index_at(position)
        assert item["input_ids"].tolist() == [4 * item["index"] + place for place in range(4)]


@pytest.mark.parametrize("weights", [[0.5, 0.3, 0.15, 0.05], [2, 1], [5.0], [1e-6, 1], [1 / 3, 2**0.5, 123.0]])
def test_a_blend_draws_from_its_sources_by_their_weights_in_a_seeded_order(weights):
    blend = Blend([make_dataset(3 + number, 2) for number in range(len(weights))], weights, seed=1)
    drawn = np.array([blend[position]["source"] for position in range(2000)])
    shares = np.bincount(blend_schedule(weights, 1), minlength=len(weights)) / len(blend_schedule(weights, 1))
    assert np.abs(shares - np.array(weights) / sum(weights)).max() < 2e-4 and shares.min() > 0
    for source, share in enumerate(shares):
        assert abs((drawn == source).mean() - share) < 0.05
    if len(weights) > 1 and min(weights) > 1e-3:
        assert drawn.tolist() != np.sort(drawn).tolist()
        assert (blend_schedule(weights, 1) != blend_schedule(weights, 2)).any()


@pytest.mark.parametrize("seed", [0, 5, 2**31])
def test_the_schedule_of_a_blend_is_no_source_s_order(seed):
    """numpy reads the seeds 5 and [5, 0, 0] as one."""
    schedule = blend_schedule([1, 1], seed)
    as_source = np.random.default_rng([seed, 0, 0]).permutation(np.repeat([0, 1], len(schedule) // 2))
    assert 0.4 < (schedule == as_source).mean() < 0.6


def test_exhausted_source_repeats_in_a_fresh_permutation():
    blend = Blend([make_dataset(10, 2), make_dataset(30, 2, 1000)], [1, 1], seed=4)
    drawn = [[], []]
    for position in range(100):
        item = blend[position]
        assert item["input_ids"][0] == 2 * item["index"] + 1000 * item["source"]
        drawn[item["source"]].append(item["index"])
    epochs = [drawn[0][start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert sorted(drawn[1][:30]) == list(range(30))


def test_seed_selects_the_order_and_sources_differ():
    datasets = [make_dataset(50, 2), make_dataset(50, 2)]
    orders = [[Blend(datasets, [1, 1], seed)[position]["index"] for position in range(100)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_blend_starts_at_any_position_at_once():
    blend = Blend([make_dataset(10, 2), make_dataset(30, 2)], [0.9, 0.1])
    assert blend[10**15]["source"] in (0, 1)
