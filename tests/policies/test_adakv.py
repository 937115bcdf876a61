"""AdaKV against its oracle and worked numbers."""

from __future__ import annotations

import pytest
import torch

from dmc.budget import Budget
from dmc.policies import AdaKV, PyramidKV

SCORES = [(0.50, 0.30, 0.15, 0.05), (0.20, 0.10, 0.04, 0.01)]


def test_agrees_with_the_oracle(assert_like_oracle, budget, group):
    assert_like_oracle("AdaKV", budget, group)


@pytest.mark.parametrize("options", [{"alpha_f": 0}, {"alpha_f": 0.5, "window": 4}, {"alpha_f": 1, "pooling": "avg"}])
def test_options_agree_with_the_oracle(assert_like_oracle, options):
    assert_like_oracle("AdaKV", {"ratio": 3}, **options)


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"alpha_f": 0}, [3, 1]),
        ({"alpha_f": 0.2}, [3, 1]),
        ({"alpha_f": 0.5}, [3, 1]),
        ({"alpha_f": 1}, [2, 2]),
        ({"alpha_f": 0.2, "official_blend": True}, [2, 1]),
    ],
)
@pytest.mark.parametrize("window", [0, 2])
def test_heads_share_a_layer_by_their_scores(make_entries, options, counts, window):
    observed = torch.tensor([[*scores, *[torch.inf] * window] for scores in SCORES])
    keep = AdaKV(budget=Budget(tokens=1), **options).keep(make_entries(2, 4 + window, observed=observed), 2 + window)
    for head, count in enumerate(counts):
        assert keep[0, head].nonzero().flatten().tolist() == [*range(count), *range(4, 4 + window)]


@pytest.mark.parametrize(("alpha_f", "counts"), [(0.2, [86, 14]), (0.5, [72, 28])])
def test_the_authors_blend_rounds_half_to_even(make_entries, alpha_f, counts):
    observed = torch.rand(2, 200, generator=torch.Generator().manual_seed(0))
    observed[0, :95] += 2
    observed[1, :5] += 2
    keep = AdaKV(budget=Budget(tokens=1), alpha_f=alpha_f, official_blend=True).keep(
        make_entries(2, 200, observed=observed), 50
    )
    assert keep.sum(-1).flatten().tolist() == counts


def test_a_pyramid_of_layers_is_that_of_pyramidkv(make_stock, make_prompts, scored):
    budget, model, prompts, continuations = Budget(ratio=4), make_stock(num_layers=3), make_prompts(60), [[1, 2, 3]]
    (ada,) = scored(model, AdaKV(budget=budget, window=8, layer_budget="pyramid"), prompts, continuations)
    (pyramid,) = scored(model, PyramidKV(budget=budget), prompts, continuations)
    assert ada.slots.sum(-1).tolist() == pyramid.slots.sum(-1).tolist()
    assert ada.slots.sum() == 3 * 2 * (15 + 2)
    (equal,) = scored(model, AdaKV(budget=budget, window=8, layer_budget="pyramid", alpha_f=1), prompts, continuations)
    assert equal.positions == pyramid.positions


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"alpha_f": 1.5}, "alpha_f=1.5: expected a share from 0 to 1"),
        ({"layer_budget": "entropy"}, "layer_budget='entropy' is unknown: expected 'uniform' or 'pyramid'"),
        ({"beta": 0}, "beta=0: expected a number >= 1"),
        ({"kernel_size": 2}, "kernel_size=2: expected an odd number"),
    ],
)
def test_options_out_of_range_are_refused(options, error):
    with pytest.raises(ValueError, match=error):
        AdaKV(budget=Budget(ratio=2), **options)
