"""Budgets of a ratio against whole-number arithmetic."""

from fractions import Fraction

import pytest

from dmc.budget import Budget, achieved_ratio, sequence_ratio


@pytest.mark.parametrize("ratio", [1.1, 1.25, 7 / 3, 2.2, 10 / 3, 4.4, 4.0, 7.7, 12.8])
def test_a_budget_is_the_whole_part_of_the_quotient_and_holds_the_ratio(ratio):
    exact, budget = Fraction(ratio).limit_denominator(100), Budget(ratio=ratio)
    lengths = range(11, 4001)
    assert [budget.entries(n) for n in lengths] == [max(1, n // exact) for n in lengths]
    assert all(achieved_ratio(n, 1, 1, budget.entries(n)) >= ratio * (1 - 1e-12) for n in lengths if n >= ratio)


def test_a_budget_of_33_tokens_at_ratio_1_1_is_30():
    assert Budget(ratio=1.1).entries(33) == 30
    assert Budget(ratio=1.1).entries(32) == 29


def test_the_ratio_of_a_sequence_counts_what_windows_keep():
    windows = (None, 128, None, 128)
    assert sequence_ratio(4, 4096, windows) == (2 * 4096 + 2 * 128) / (2 * 1024 + 2 * 128)
    assert sequence_ratio(4, 64, windows) == 4 / (2 / 4 + 2)  # windows that are not full keep everything
    assert sequence_ratio(4, 4096, (None, None)) == 4 and sequence_ratio(1, 4096, windows) == 1
