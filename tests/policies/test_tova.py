"""TOVA against its oracle and worked numbers."""

from __future__ import annotations

import pytest
import torch

from dmc.budget import Budget
from dmc.policies import TOVA


def test_agrees_with_the_oracle(assert_like_oracle, budget, group):
    assert_like_oracle("TOVA", budget, group)


@pytest.mark.parametrize(
    "options", [{"per_head": True}, {"protect_last": True}, {"per_head": True, "protect_last": True}]
)
def test_options_agree_with_the_oracle(assert_like_oracle, options):
    assert_like_oracle("TOVA", {"ratio": 3}, **options)


@pytest.mark.parametrize(
    ("rows", "evicted"),
    [
        ([[0.30, 0.10, 0.20, 0.15, 0.25]], [1]),
        ([[0.1, 0.2, 0.7], [0.5, 0.1, 0.4]], [1, 1]),
        ([[0.5, 0.4, 0.1]], [2]),
    ],
)
def test_what_all_heads_attend_to_least_goes(make_entries, rows, evicted):
    entries = make_entries(len(rows), len(rows[0]), row=rows)
    limit = torch.tensor([len(rows[0]) - 1])
    assert TOVA(budget=Budget(tokens=1)).evicted(entries, limit)[0].tolist() == evicted


def test_heads_may_choose_for_themselves_and_spare_the_newest(make_entries):
    entries = make_entries(2, 3, row=[[0.1, 0.2, 0.7], [0.5, 0.4, 0.1]])
    policy = TOVA(budget=Budget(tokens=2), per_head=True, protect_last=True)
    assert policy.evicted(entries, torch.tensor([2]))[0].tolist() == [0, 1]
