import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from dmc.data import Blend, PackedTokens, Positions, Shuffled
from dmc.data.order import blend_schedule
from dmc.data.packing import TokenArrays, TokenTable


def make_dataset(num_sequences, length=4, first_token=0):
    token_ids = np.arange(first_token, first_token + num_sequences * length, dtype=np.int32)
    arrays = TokenArrays(pa.chunked_array([token_ids]), np.array([len(token_ids)]))
    return PackedTokens(TokenTable(lambda: arrays), length)


@given(st.integers(1, 300), st.integers(0, 2**32 - 1), st.integers(0, 10))
def test_every_epoch_is_a_permutation(num_samples, seed, epoch):
    shuffled = Shuffled(range(num_samples), seed)
    drawn = [shuffled.index_at(epoch * num_samples + offset) for offset in range(num_samples)]
    assert sorted(drawn) == list(range(num_samples))


def test_order_of_a_seed_is_known():
    """A run resumed elsewhere goes on in the same order."""
    shuffled = Shuffled(range(10), 0)
    assert [shuffled.index_at(position) for position in range(10)] == [4, 6, 2, 7, 3, 5, 9, 0, 8, 1]


def test_epochs_and_seeds_are_shuffled_differently():
    orders = [Shuffled(range(50), seed) for seed in (0, 1)]
    epochs = {tuple(order.index_at(start + offset) for offset in range(50)) for order in orders for start in (0, 50)}
    assert len(epochs) == 4


@given(num_draws=st.integers(12, 200), first_size=st.integers(1, 6), second_size=st.integers(1, 6), data=st.data())
def test_resuming_at_any_position_and_world_size_continues_the_global_order(num_draws, first_size, second_size, data):
    def positions(start, world_size):
        ranks = [list(Positions(num_draws, start, rank, world_size)) for rank in range(world_size)]
        return [position for draw in zip(*ranks, strict=True) for position in draw]

    consumed = data.draw(st.integers(0, num_draws // first_size)) * first_size
    drawn = positions(0, first_size)[:consumed] + positions(consumed, second_size)
    assert drawn == list(range(len(drawn)))
    assert num_draws - len(drawn) < second_size


KEYS = ("input_ids", "index", "position")


def collect(dataset, positions, num_workers, batch_size):
    batches = list(DataLoader(dataset, batch_size, sampler=positions, num_workers=num_workers))
    return [torch.cat([batch[name].reshape(len(batch["position"]), -1) for batch in batches]) for name in KEYS]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("blended", [False, True])
def test_resumed_loader_yields_what_the_uninterrupted_one_would(num_workers, blended):
    dataset = Blend([make_dataset(7), make_dataset(5)], [0.7, 0.3], 5) if blended else Shuffled(make_dataset(7), 5)
    alone = collect(dataset, Positions(40), 0, 4)
    ranks = [collect(dataset, Positions(40, 16, rank, 2), num_workers, 3) for rank in range(2)]
    for expected, *parts in zip(alone, *ranks, strict=True):
        assert torch.equal(torch.stack(parts, dim=1).flatten(0, 1), expected[16:])


def test_item_carries_its_position():
    shuffled = Shuffled(make_dataset(6), 2)
    for position in range(30):
        item = shuffled[position]
        assert item["position"] == position and item["index"] == shuffled.index_at(position)
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
