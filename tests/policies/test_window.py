"""The local window and StreamingLLM against their oracles and worked numbers."""

from __future__ import annotations

import pytest

from dmc.budget import Budget
from dmc.policies import LocalWindow, StreamingLLM


@pytest.mark.parametrize("method", ["LocalWindow", "StreamingLLM"])
def test_agrees_with_the_oracle(assert_like_oracle, method, budget, group):
    assert_like_oracle(method, budget, group)


@pytest.mark.parametrize("options", [{"sinks": 0}, {"sinks": 9}, {"sinks": 99}])
def test_sinks_agree_with_the_oracle(assert_like_oracle, options):
    assert_like_oracle("StreamingLLM", {"ratio": 3}, **options)


@pytest.mark.parametrize("sinks", [0, 4, 99])
def test_keys_turned_to_their_place_in_the_cache_agree_with_the_oracle(assert_like_oracle, budget, sinks):
    assert_like_oracle("StreamingLLM", budget, rerotate=True, sinks=sinks)


def test_turning_keys_leaves_a_neighbour_with_fewer_entries_than_sinks_alone(assert_like_oracle):
    assert_like_oracle("StreamingLLM", {"ratio": 2}, rerotate=True, prompt_lengths=(41, 1))


def test_two_sinks_and_the_last_three_of_ten_stay(make_entries):
    keep = StreamingLLM(budget=Budget(tokens=5), sinks=2).keep(make_entries(1, 10), 5)
    assert keep.flatten().nonzero().flatten().tolist() == [0, 1, 7, 8, 9]


@pytest.mark.parametrize(("budget", "kept"), [(1, [9]), (2, [0, 9]), (3, [0, 1, 9]), (5, [0, 1, 2, 3, 9])])
@pytest.mark.filterwarnings("ignore:sinks=4 do not fit")
def test_the_newest_entry_stays_beside_the_sinks(make_entries, budget, kept):
    keep = StreamingLLM(budget=Budget(tokens=budget)).keep(make_entries(1, 10), budget)
    assert keep.flatten().nonzero().flatten().tolist() == kept


def test_a_window_keeps_the_last_entries(make_entries):
    keep = LocalWindow(budget=Budget(tokens=4)).keep(make_entries(2, 10), 4)
    assert keep[0].nonzero()[:, 1].tolist() == 2 * [6, 7, 8, 9]


def test_a_negative_number_of_sinks_is_refused():
    with pytest.raises(ValueError, match="sinks=-1: expected a number of tokens >= 0"):
        StreamingLLM(budget=Budget(ratio=2), sinks=-1)
