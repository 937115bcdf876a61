import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmc.data import Blend, PackedTokens
from dmc.data.order import blend_schedule, integer_shares
from dmc.data.packing import TokenChunk, TokenTable


def make_dataset(num_sequences: int, first_token: int = 0) -> PackedTokens:
    token_ids = np.arange(first_token, first_token + num_sequences * 2, dtype=np.int32)
    return PackedTokens(TokenTable(lambda: [TokenChunk(token_ids, np.array([len(token_ids)]))]), 2)


@settings(deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=12))
def test_every_prefix_holds_each_share_to_within_one_sample(shares: list[int]) -> None:
    schedule = blend_schedule(shares)
    period = sum(shares)
    places = np.arange(1, period + 1)
    for source, share in enumerate(shares):
        counts = np.cumsum(schedule == source)
        assert counts[-1] == share
        assert np.abs(counts * period - places * share).max() < period


def test_every_prefix_of_a_blend_holds_the_weights_beyond_one_period() -> None:
    weights = [0.5, 0.3, 0.15, 0.05]
    blend = Blend([make_dataset(3 + number) for number in range(4)], weights)
    counts = np.zeros(4)
    for position in range(500):
        source, drawn_before = blend.locate(position)
        assert drawn_before == counts[source]
        counts[source] += 1
        assert np.abs(counts - np.array(weights) * (position + 1)).max() < 1 + 1e-9


@pytest.mark.parametrize(
    ("weights", "shares"),
    [([0.7, 0.3], [7, 3]), ([2, 1], [2, 1]), ([0.1, 0.2, 0.3], [1, 2, 3]), ([5.0], [1]), ([1e-3, 1], [1, 1000])],
)
def test_weights_become_the_smallest_integers(weights: list[float], shares: list[int]) -> None:
    assert integer_shares(weights) == shares


def test_awkward_weights_are_rounded() -> None:
    weights = [1 / 3, 2**0.5, 123_456_789.0, 0.1]
    shares = integer_shares(weights)
    schedule = blend_schedule(shares)
    assert min(shares) >= 1
    assert len(schedule) == sum(shares) <= 2**16 + len(weights)
    fractions = integer_shares([1 / 3, 2 / 3 + 1e-9, 1.0])
    assert np.allclose(np.array(fractions) / sum(fractions), [1 / 6, 1 / 3, 1 / 2], atol=1e-5)


def test_exhausted_source_repeats_in_a_fresh_permutation() -> None:
    blend = Blend([make_dataset(10), make_dataset(30, 1000)], [1, 1], seed=4)
    drawn: list[list[int]] = [[], []]
    for position in range(80):
        item = blend[position]
        assert item["input_ids"][0] == 2 * item["index"] + 1000 * item["source"]
        drawn[item["source"]].append(item["index"])
    epochs = [drawn[0][start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert sorted(drawn[1][:30]) == list(range(30))


def test_seed_selects_the_order_and_sources_differ() -> None:
    datasets = [make_dataset(50), make_dataset(50)]
    orders = [[Blend(datasets, [1, 1], seed)[position]["index"] for position in range(100)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][0::2] != orders[0][1::2]


def test_blend_starts_at_any_position_at_once() -> None:
    blend = Blend([make_dataset(10), make_dataset(30)], [0.9, 0.1])
    assert blend[10**15]["source"] in (0, 1)
