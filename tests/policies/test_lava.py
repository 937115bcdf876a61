"""LAVa against its oracle and worked numbers."""

from __future__ import annotations

import pytest
import torch

from dmc.budget import Budget
from dmc.policies import LAVa

ATTENTION = [(0.40, 0.12, 0.09, 0.05), (0.11, 0.10, 0.30, 0.21)]
TIMES_VALUE = [0.80, 0.24, 0.18, 0.10, 0.11, 0.10, 0.30, 0.21]


def test_agrees_with_the_oracle(assert_like_oracle, budget, group):
    assert_like_oracle("LAVa", budget, group)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 4, "pooling": "avg", "kernel_size": 3},
        {"layer_budget": "uniform"},
        {"layer_budget": "pyramid"},
        {"head_budget": "equal"},
        {"head_budget": "equal", "layer_budget": "uniform"},
        {"floor": 0.2},
        {"floor": 1},
    ],
)
def test_options_agree_with_the_oracle(assert_like_oracle, options):
    assert_like_oracle("LAVa", {"ratio": 3}, **options)


@pytest.fixture
def worked(make_entries):
    """Two heads, four entries and a window of one; the largest value of the first head is twice the second's."""
    rows = torch.tensor([[*head, 0.0] for head in ATTENTION])[:, None, None]  # [H, group, w, N]
    values = torch.zeros(2, 5, 2)
    values[0, 1], values[1, 4] = torch.tensor([-1.5, 0.5]), torch.tensor([0.0, 1.0])
    return make_entries(2, 5, rows=rows, values=values.tolist())


def test_attention_counts_times_the_largest_value_of_the_head(worked):
    observed = LAVa(budget=Budget(tokens=2), window=1, kernel_size=1).observe(worked, 2)
    assert observed[..., :4].flatten().tolist() == pytest.approx(TIMES_VALUE)
    assert (observed[..., 4] == torch.inf).all()


def test_the_weight_of_a_layer_is_its_entropy(worked):
    policy = LAVa(budget=Budget(tokens=2), window=1, kernel_size=1)
    worked.observed = policy.observe(worked, 2)
    assert policy.layer_weight(worked, 2) == pytest.approx(0.866642, abs=1e-6)
    worked.observed[..., :4] = 0.5
    assert policy.layer_weight(worked, 2) == pytest.approx(1)
    worked.observed[..., :4] = torch.tensor([[0.0, 0, 1, 0], [0, 0, 0, 0]])
    assert policy.layer_weight(worked, 2) == 0


@pytest.mark.parametrize("score", [0.0, torch.inf])
def test_a_layer_without_attention_or_without_candidates_weighs_nothing(worked, score):
    worked.observed = torch.full((1, 2, 5), score)
    assert LAVa(budget=Budget(tokens=2), window=1).layer_weight(worked, 2) == 0


def test_heads_compete_unless_they_are_equal(worked):
    pooled, equal = (
        LAVa(budget=Budget(tokens=2), window=1, kernel_size=1, head_budget=rule) for rule in ("pooled", "equal")
    )
    worked.observed = pooled.observe(worked, 2)
    assert pooled.keep(worked, 3)[0, :, :4].tolist() == [[True, True, False, False], [False, False, True, True]]
    worked.observed[0, 0, :4] *= 10
    assert pooled.keep(worked, 3).sum(-1).tolist() == [[5, 1]]
    assert equal.keep(worked, 3).sum(-1).tolist() == [[3, 3]]


def test_budgets_of_the_layers_seen_shrink_as_more_are_seen():
    policy = LAVa(budget=Budget(tokens=1), window=4)
    budgets = [policy.layer_budgets([3.0, 1.0, 2.0][:seen], 4 + 4, 3, 1000) for seen in (1, 2, 3)]
    assert budgets == [[4 + 12], [4 + 9, 4 + 3], [4 + 6, 4 + 2, 4 + 4]]


def test_what_a_layer_cannot_hold_goes_to_the_others():
    policy = LAVa(budget=Budget(tokens=1), window=4)
    assert policy.layer_budgets([6.0, 3.0, 1.0], 4 + 8, 3, 4 + 10) == [4 + 10, 4 + 10, 4 + 4]


def test_scaling_all_values_of_a_layer_changes_nothing(worked):
    policy = LAVa(budget=Budget(tokens=2), window=1, kernel_size=1)
    worked.observed = policy.observe(worked, 2)
    weight, keep = policy.layer_weight(worked, 2), policy.keep(worked, 2)
    worked.observed *= 10
    assert policy.layer_weight(worked, 2) == pytest.approx(weight)
    assert torch.equal(policy.keep(worked, 2), keep)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"layer_budget": "variance"}, "layer_budget='variance': expected 'entropy', 'uniform' or 'pyramid'"),
        ({"head_budget": "free"}, "head_budget='free': expected 'pooled' or 'equal'"),
        ({"floor": 2}, "floor=2: expected a share from 0 to 1"),
        ({"beta": 0.1}, "beta=0.1: expected a number >= 1"),
        ({"window": -3}, "window=-3: expected a number of queries >= 1"),
    ],
)
def test_options_out_of_range_are_refused(options, error):
    with pytest.raises(ValueError, match=error):
        LAVa(budget=Budget(ratio=2), **options)
