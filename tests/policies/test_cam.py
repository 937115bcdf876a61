"""CaM against its oracle and worked numbers."""

from __future__ import annotations

import pytest
import torch

from dmc.budget import Budget
from dmc.policies import CaM


def test_agrees_with_the_oracle_in_expectation(assert_like_oracle, budget, group):
    assert_like_oracle("CaM", budget, group, expectation=True)


@pytest.mark.parametrize("m", [1, 3])
def test_fewer_followers_agree_with_the_oracle(assert_like_oracle, m):
    assert_like_oracle("CaM", {"ratio": 3}, expectation=True, m=m)


def values_after(policy, entries, age):
    """Let one entry of a single head go; return what its head then holds, [N, D]."""
    leaving = entries.slots.eq(age).expand(entries.positions.shape)
    rewrite, values = policy.merge(entries, leaving), entries.read_values()[0, 0].clone()
    for place, value in zip(rewrite.slots[0, 0].tolist(), rewrite.value[0, 0], strict=True):
        if place >= 0:
            values[place] = value
    assert rewrite.key is None
    return values


def test_the_value_is_divided_among_the_entries_right_after(make_entries):
    values = torch.zeros(1, 6, 2)
    values[0, 1] = torch.tensor([6.0, 3.0])
    entries = make_entries(1, 6, values=values.tolist(), sums={"mass": [[1.0, 9.0, 1.0, 1.0, 1.0, 1.0]]})
    after = values_after(CaM(budget=Budget(tokens=5), m=3), entries, age=1)  # probability 1: clamped
    assert after.tolist() == [[0, 0], [6, 3], [2, 1], [2, 1], [2, 1], [0, 0]]
    assert after[2:].sum(0).tolist() == [6, 3]


def test_fewer_followers_than_asked_for_share_all_of_it(make_entries):
    values = [[[1.0, 0.0], [0.0, 1.0], [4.0, 2.0], [0.0, 0.0]]]
    entries = make_entries(1, 4, values=values, sums={"mass": [[1.0, 1.0, 2.0, 1.0]]})
    assert values_after(CaM(budget=Budget(tokens=3)), entries, age=2)[3].tolist() == [4, 2]


def test_what_was_attended_to_less_than_its_followers_is_merged_less_often(make_entries):
    mass = [[0.2, 0.4, 0.5, 0.3]]
    entries = make_entries(1, 4, values=[[[6.0, 3.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]], sums={"mass": mass})
    after = values_after(CaM(budget=Budget(tokens=3), expectation=True), entries, age=0)
    assert after[1:].flatten().tolist() == pytest.approx(3 * [1.0, 0.5])  # p = 0.5

    def merges(seed):
        return bool(values_after(CaM(budget=Budget(tokens=3), seed=seed), entries, age=0)[1:].any())

    drawn = [merges(seed) for seed in range(400)]
    assert 160 < sum(drawn) < 240
    assert drawn == [merges(seed) for seed in range(400)]


def test_draws_differ_from_place_to_place(make_entries):
    policy = CaM(budget=Budget(tokens=3))
    draws = torch.cat([policy._draw(make_entries(3, 500, layer_index=layer, num_layers=4)) for layer in range(4)])
    assert draws.unique().numel() > 5900
    assert draws.min() >= 0 and draws.max() < 1
    assert draws.mean().item() == pytest.approx(0.5, abs=0.02)
    assert draws.flatten(1).corrcoef().sub(torch.eye(4)).abs().max() < 0.1


@pytest.mark.parametrize(
    ("options", "error"),
    [({"m": 0}, "m=0: expected a number of entries >= 1"), ({"recent": -1}, "recent=-1: expected")],
)
def test_options_out_of_range_are_refused(options, error):
    with pytest.raises(ValueError, match=error):
        CaM(budget=Budget(ratio=2), **options)
