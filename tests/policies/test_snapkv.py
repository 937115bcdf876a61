"""SnapKV against its oracle."""

from __future__ import annotations

import pytest

from dmc.budget import Budget
from dmc.policies import SnapKV


def test_agrees_with_the_oracle(assert_like_oracle, budget, group):
    assert_like_oracle("SnapKV", budget, group)


@pytest.mark.parametrize(
    "options", [{"window": 1}, {"window": 4, "pooling": "avg"}, {"kernel_size": 1}, {"kernel_size": 5}]
)
def test_options_agree_with_the_oracle(assert_like_oracle, options):
    assert_like_oracle("SnapKV", {"ratio": 3}, **options)


def test_the_window_stays_and_the_cache_grows(make_stock, make_prompts, scored):
    policy = SnapKV(budget=Budget(tokens=12), window=5)
    (trace,) = scored(make_stock(), policy, make_prompts(40), make_prompts(7, seed=2))
    assert (trace.slots == 12 + 6).all()
    for heads in trace.positions:
        for positions in heads:
            assert positions[-11:] == list(range(35, 46))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"window": 0}, "window=0: expected a number of queries >= 1"),
        ({"kernel_size": 4}, "kernel_size=4: expected an odd number >= 1, such as 7"),
        ({"kernel_size": -1}, "kernel_size=-1: expected an odd number"),
        ({"kernel_size": 7.0}, "kernel_size=7.0: expected an odd number"),
        ({"pooling": "mean"}, "pooling='mean' is unknown: expected 'max' or 'avg'"),
    ],
)
def test_options_out_of_range_are_refused(options, error):
    with pytest.raises(ValueError, match=error):
        SnapKV(budget=Budget(ratio=2), **options)
