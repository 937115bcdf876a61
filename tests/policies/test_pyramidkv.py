"""PyramidKV against its oracle and worked numbers."""

from __future__ import annotations

import pytest

from dmc.budget import Budget
from dmc.policies import PyramidKV


def test_agrees_with_the_oracle(assert_like_oracle, budget, group):
    assert_like_oracle("PyramidKV", budget, group)


@pytest.mark.parametrize(
    "options",
    [{"decay": "geometric"}, {"decay": "exponential"}, {"beta": 2, "window": 3}, {"beta": 1.5, "pooling": "avg"}],
)
@pytest.mark.parametrize("ratio", [3, 6])
def test_options_agree_with_the_oracle(assert_like_oracle, options, ratio):
    assert_like_oracle("PyramidKV", {"ratio": ratio}, **options)


def test_budgets_fall_from_layer_to_layer_and_add_up():
    policy = PyramidKV(budget=Budget(tokens=1), beta=5)
    assert policy.layer_budgets([1.0] * 4, 18, 4, 1000) == [8 + each for each in (18, 13, 7, 2)]
    budgets = PyramidKV(budget=Budget(tokens=1)).layer_budgets([1.0] * 32, 128, 32, 4000)
    assert (budgets[0], budgets[-1], sum(budgets)) == (8 + 234, 8 + 6, 32 * 128)


def test_a_layer_needs_no_other_to_know_its_budget():
    policy = PyramidKV(budget=Budget(tokens=1), beta=5)
    for seen in range(1, 5):
        assert policy.layer_budgets([1.0] * seen, 18, 4, 1000) == policy.layer_budgets([1.0] * 4, 18, 4, 1000)[:seen]


@pytest.mark.parametrize(
    ("limit", "window", "first", "last", "total"),
    [(64, 8, 110, 17, 2032), (128, 8, 234, 17, 4016), (512, 32, 936, 37, 15568), (2048, 8, 3978, 103, 65296)],
)
def test_the_authors_rounding_holds_more_than_the_budget(limit, window, first, last, total):
    policy = PyramidKV(budget=Budget(tokens=1), window=window, official_floor=True)
    beside = [budget - window for budget in policy.layer_budgets([1.0] * 32, limit, 32, 10_000)]
    assert (beside[0], beside[-1], sum(beside)) == (first, last, total)


@pytest.mark.parametrize("official_floor", [False, True])
def test_budgets_are_uniform_where_the_pyramid_does_not_fit(official_floor):
    policy = PyramidKV(budget=Budget(tokens=1), official_floor=official_floor)
    assert policy.layer_budgets([1.0] * 4, 28, 4, 8 + 39) == [28] * 4
    assert policy.layer_budgets([1.0] * 4, 28, 4, 8 + 40) != [28] * 4


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"beta": 0.5}, "beta=0.5: expected a number >= 1"),
        ({"beta": float("nan")}, "beta=nan: expected a number >= 1"),
        ({"decay": "cubic"}, "decay='cubic' is unknown: expected 'linear', 'geometric' or 'exponential'"),
        ({"window": 0}, "window=0: expected"),
    ],
)
def test_options_out_of_range_are_refused(options, error):
    with pytest.raises(ValueError, match=error):
        PyramidKV(budget=Budget(ratio=2), **options)
