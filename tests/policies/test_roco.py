"""RoCo against its oracle and worked numbers."""

from __future__ import annotations

import pytest
import torch

from dmc.budget import Budget
from dmc.policies import RoCo


def test_agrees_with_the_oracle(assert_like_oracle, budget, group):
    assert_like_oracle("RoCo", budget, group)


@pytest.mark.parametrize("options", [{"recent_ratio": 0}, {"recent_ratio": 0.75}, {"recent_ratio": 0.99}])
def test_options_agree_with_the_oracle(assert_like_oracle, options):
    assert_like_oracle("RoCo", {"ratio": 2}, **options)


def test_more_than_ten_newest_are_not_all_safe(assert_like_oracle):
    assert_like_oracle("RoCo", {"tokens": 30}, recent_ratio=0.6, prompt_lengths=(50,))


def test_mean_attention_ranks_what_does_not_vary(make_entries):
    sums = {"mass": [[0.9, 0.4, 0.5]], "squares": [[0.5, 0.1, 0.25]]}
    scores = RoCo(budget=Budget(tokens=2), recent_ratio=0).scores(make_entries(1, 3, sums=sums), 2)
    assert scores.flatten().tolist() == pytest.approx([0.3, 0.2, torch.inf])  # the newest is safe


def test_what_varies_most_is_safe(make_entries):
    queries = torch.tensor([12, *range(11, 0, -1)])
    mass, squares = 0.2 * queries, 0.04 * queries
    squares[1] += 1
    entries = make_entries(1, 12, sums={"mass": [mass.tolist()], "squares": [squares.tolist()]})
    scores = RoCo(budget=Budget(tokens=10)).scores(entries, 100)  # r = 30: 10 newest, and whatever varies
    assert (scores == torch.inf).flatten().tolist() == [True] * 12
    scores = RoCo(budget=Budget(tokens=10), recent_ratio=0.1).scores(entries, 10)  # r = 1: the 2 newest
    assert (scores == torch.inf).flatten().nonzero().flatten().tolist() == [10, 11]


@pytest.mark.parametrize("share", [-0.1, 1, 1.5])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(ValueError, match=f"recent_ratio={share}: expected a share from 0 to below 1"):
        RoCo(budget=Budget(ratio=2), recent_ratio=share)
