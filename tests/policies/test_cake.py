"""CAKE against its oracle and worked numbers."""

import pytest
import torch

from dmc.budget import Budget
from dmc.policies import CAKE


def test_layers_compressed_as_they_are_seen_hold_the_same_in_the_end(make_stock, make_prompts, scored):
    model, prompts, continuations = make_stock(num_layers=4), make_prompts(60, 33), make_prompts(6, 4, seed=2)
    at_once, one_by_one = (
        scored(model, CAKE(budget=Budget(ratio=4), cascading=cascading), prompts, continuations)
        for cascading in (False, True)
    )
    for expected, trace in zip(at_once, one_by_one, strict=True):
        assert trace.positions == expected.positions
        torch.testing.assert_close(trace.log_probs, expected.log_probs, rtol=0, atol=1e-5)


def entropy_and_variance(rows):
    """Naive: of attention [heads][queries][keys]."""
    entropy = -sum(float(weight * (weight + 1e-10).log()) for head in rows for query in head for weight in query)
    variance = 0.0
    for head in rows:
        for column in head.T:
            variance += float((column - column.mean()).square().sum() / (len(column) - 1))
    return entropy, variance


@pytest.mark.parametrize(("tau1", "tau2"), [(1, 1), (2, 1), (1.6, 0.4)])
def test_a_layers_weight_is_entropy_times_variance(make_entries, tau1, tau2):
    rows = torch.rand(2, 2, 3, 8, generator=torch.Generator().manual_seed(0)).softmax(-1)  # [H, group, w, N]
    entropy, variance = entropy_and_variance(rows[..., :5].flatten(0, 1).double())
    weight = CAKE(budget=Budget(tokens=6), window=3, tau1=tau1, tau2=tau2).layer_weight(
        make_entries(2, 8, window_attention=rows), 6
    )
    assert weight == pytest.approx(entropy ** (1 / tau1) * variance ** (1 / tau2), rel=1e-5)


def test_layers_share_what_is_beside_the_window_in_proportion():
    policy = CAKE(budget=Budget(tokens=1), window=4)
    assert policy.layer_budgets([0.02, 0.16], 4 + 9, 2, 1000) == [4 + 2, 4 + 16]
    assert policy.layer_budgets([0.02, 0.16], 4 + 9, 2, 4 + 12) == [4 + 6, 4 + 12]  # the second is full
    assert policy.layer_budgets([0.0, 0.0], 4 + 9, 2, 1000) == [4 + 9, 4 + 9]
    budgets = policy.layer_budgets([1 / 3, 1 / 3, 1 / 3], 4 + 7, 3, 1000)
    assert sum(budgets) == 3 * 11


def test_constant_attention_ranks_by_its_mean_alone(make_entries):
    row = torch.tensor([0.1, 0.4, 0.2, 0.3, 0.0, 0.0])
    entries = make_entries(1, 6, window_attention=row.expand(1, 1, 2, 6))
    observed = CAKE(budget=Budget(tokens=4), window=2, kernel_size=1).observe(entries, 4)
    assert observed.flatten().tolist() == pytest.approx([0.1, 0.4, 0.2, 0.3, torch.inf, torch.inf])
