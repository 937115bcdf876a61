"""D2O against its oracle and worked numbers."""

import math

import pytest
import torch

from dmc.budget import Budget
from dmc.policies import D2O
from dmc.policies.d2o import clamped_shares


@pytest.mark.parametrize(
    ("spreads", "ratio", "shares"),
    [
        ((0, 0.5, 1), 0.2, (0.303888, 0.184318, 0.111794)),
        ((1, 2, 10), 0.8, (1, 1, 0.4)),
        ((1, 2, 10), 0.2, (0.59 * 0.7310586, 0.59 * 0.2689414, 0.01)),
    ],
)
def test_layers_with_even_attention_get_more(spreads, ratio, shares):
    assert clamped_shares([math.exp(-spread) for spread in spreads], ratio) == pytest.approx(shares, abs=1e-6)


def test_layer_budgets_are_whole_shares_of_the_prompt():
    policy = D2O(budget=Budget(ratio=5))
    assert policy.layer_budgets([0.0, -0.5, -1.0], 20, 3, 100) == [30, 18, 11]
    assert policy.layer_budgets([0.0, 0.0, 0.0], 20, 3, 100) == [20, 20, 20]
    assert D2O(budget=Budget(tokens=20)).layer_budgets([0.0, 0.0, 0.0], 20, 3, 100) == [20, 20, 20]
    reciprocal = D2O(budget=Budget(ratio=5), allocation="reciprocal")
    assert reciprocal.layer_budgets([3.0, 2.0, 1.0], 20, 3, 100) == [30, 20, 10]


def columns_of(*variances):
    """What one query head gave to two entries, so that its variance is the given one."""
    return [torch.tensor([[[0.0, math.sqrt(2 * variance)]]]) for variance in variances]


@pytest.mark.parametrize(("offset", "shares"), [(0, (78, 10, 1)), (5000, (78, 10, 1))])
def test_variances_as_in_equation_4_tell_layers_apart_that_scaling_makes_alike(make_entries, offset, shares):
    columns = columns_of(offset + 0.5, offset + 2.5, offset + 9)
    eq4, scaled = (D2O(budget=Budget(tokens=30), scaled=scaled) for scaled in (False, True))
    plain = [eq4.layer_weight(make_entries(1, 2, prompt_attention=attention), 30) for attention in columns]
    assert plain == pytest.approx([-(offset + attention) for attention in (0.5, 2.5, 9)], abs=1e-2)
    assert tuple(eq4.layer_budgets(plain, 30, 3, 100)) == pytest.approx(shares, abs=1)
    alike = [scaled.layer_weight(make_entries(1, 2, prompt_attention=attention), 30) for attention in columns]
    assert scaled.layer_budgets(alike, 30, 3, 100) == [30, 30, 30]


@pytest.mark.parametrize(
    ("weights", "average", "shares"),
    [
        ((1, 1, 1), 0.005, (0.005, 0.005, 0.005)),  # less than the lower clamp would hold
        ((1, 0, 0, 0), 0.25, (0.97, 0.01, 0.01, 0.01)),  # nothing but the upper clamp to take from
        ((1, 1e-9, 1e-30, 1e-30), 0.5025, (1, 0.99, 0.01, 0.01)),
    ],
)
def test_clamps_never_take_more_than_the_budget(weights, average, shares):
    assert clamped_shares(list(weights), average) == pytest.approx(shares, abs=1e-6)


def test_a_budget_is_sinks_then_three_to_one_heavy_and_recent(make_entries):
    scores = D2O(budget=Budget(tokens=40)).scores(make_entries(1, 100, sums={"mass": [[0.5] * 100]}), 40)
    assert (scores == torch.inf).flatten().nonzero().flatten().tolist() == [0, 1, 2, 3, *range(91, 100)]


COSINES = {0.5: math.sqrt(0.75), 0.6: 0.8, 0.9: math.sqrt(0.19)}


def entries_with_one_leaving(make_entries, similarity, threshold):
    """The last of three entries goes; it is most like the first."""
    keys = [[[2.0, 0.0], [0.0, -1.0], [4 * similarity, 4 * COSINES[similarity]]]]
    return make_entries(1, 3, keys=keys, memory=[threshold])


@pytest.mark.parametrize(
    ("before", "similarity", "after"), [(torch.nan, 0.6, 0.6), (0.8, 0.6, 0.66), (0.66, 0.9, 0.828)]
)
def test_the_threshold_follows_the_similarities(make_entries, before, similarity, after):
    entries = entries_with_one_leaving(make_entries, similarity, before)
    rewrite = D2O(budget=Budget(tokens=2)).merge(entries, torch.tensor([[[False, False, True]]]), 2)
    assert entries.memory.item() == pytest.approx(after)
    merged = [0] if similarity >= after - 1e-6 else []
    assert [age for age in rewrite.slots.flatten().tolist() if age >= 0] == merged


def test_weights_of_a_merge_sum_to_one(make_entries):
    entries = entries_with_one_leaving(make_entries, 0.5, torch.nan)
    rewrite = D2O(budget=Budget(tokens=2)).merge(entries, torch.tensor([[[False, False, True]]]), 2)
    weight, other = (math.exp(similarity) / (math.exp(1) + math.exp(0.5)) for similarity in (1, 0.5))
    assert weight + other == pytest.approx(1)
    assert rewrite.key[0, 0, 0].tolist() == pytest.approx([weight * 2 + other * 2, other * 4 * COSINES[0.5]])
    assert rewrite.value[0, 0, 0].tolist() == pytest.approx([1, 1])  # all values are alike


def test_what_nothing_takes_in_stays_as_it_was(make_entries):
    entries = entries_with_one_leaving(make_entries, 0.6, 0.8)
    rewrite = D2O(budget=Budget(tokens=2)).merge(entries, torch.zeros(1, 1, 3, dtype=torch.bool), 2)
    assert (rewrite.slots < 0).all()
    assert entries.memory.item() == pytest.approx(0.8)
