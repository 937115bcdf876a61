"""Worked numbers of SnapKV, PyramidKV, AdaKV and LAVa, which compress a prompt when it ends."""

import pytest
import torch

from dmc.budget import Budget
from dmc.policies import AdaKV, LAVa, PyramidKV, SnapKV


def test_the_window_stays_and_the_cache_grows(make_stock, make_prompts, scored):
    policy = SnapKV(budget=Budget(tokens=12), window=5)
    (trace,) = scored(make_stock(), policy, make_prompts(40), make_prompts(7, seed=2))
    assert (trace.slots == 12 + 6).all()
    for heads in trace.positions:
        for positions in heads:
            assert positions[-11:] == list(range(35, 46))


def test_budgets_fall_from_layer_to_layer_and_add_up():
    policy = PyramidKV(budget=Budget(tokens=1), beta=5)
    assert policy.layer_budgets([1.0] * 4, 18, 4, 1000) == [8 + budget for budget in (18, 13, 7, 2)]
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


SCORES = [(0.50, 0.30, 0.15, 0.05), (0.20, 0.10, 0.04, 0.01)]


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
@pytest.mark.parametrize("window", [1, 2])
def test_heads_share_a_layer_by_their_scores(make_entries, options, counts, window):
    observed = torch.tensor([[*scores, *[torch.inf] * window] for scores in SCORES])
    entries = make_entries(2, 4 + window, observed=observed, limit=2 * window)
    keep = AdaKV(budget=Budget(tokens=1), **options).keep(entries, 2 + window)
    for head, count in enumerate(counts):
        assert keep[0, head].nonzero().flatten().tolist() == [*range(count), *range(4, 4 + window)]


@pytest.mark.parametrize(("alpha_f", "counts"), [(0.2, [87, 15]), (0.5, [73, 29])])
def test_the_authors_blend_rounds_half_to_even(make_entries, alpha_f, counts):
    observed = torch.rand(2, 201, generator=torch.Generator().manual_seed(0))
    observed[:, 200] = torch.inf  # a window of one
    observed[0, :95] += 2
    observed[1, :5] += 2
    entries = make_entries(2, 201, observed=observed, limit=2)
    keep = AdaKV(budget=Budget(tokens=1), alpha_f=alpha_f, official_blend=True).keep(entries, 51)
    assert keep.sum(-1).flatten().tolist() == counts


def test_a_pyramid_of_layers_is_that_of_pyramidkv(make_stock, make_prompts, scored):
    budget, model, prompts, continuations = Budget(ratio=4), make_stock(num_layers=3), make_prompts(60), [[1, 2, 3]]
    (ada,) = scored(model, AdaKV(budget=budget, window=8, layer_budget="pyramid"), prompts, continuations)
    (pyramid,) = scored(model, PyramidKV(budget=budget), prompts, continuations)
    assert ada.slots.sum(-1).tolist() == pyramid.slots.sum(-1).tolist()
    assert ada.slots.sum() == 3 * 2 * (15 + 2)
    (equal,) = scored(model, AdaKV(budget=budget, window=8, layer_budget="pyramid", alpha_f=1), prompts, continuations)
    assert equal.positions == pyramid.positions


ATTENTION = [(0.40, 0.12, 0.09, 0.05), (0.11, 0.10, 0.30, 0.21)]
TIMES_VALUE = [0.80, 0.24, 0.18, 0.10, 0.11, 0.10, 0.30, 0.21]


@pytest.fixture
def worked(make_entries):
    """Two heads, four entries and a window of one; the largest value of the first head is twice the second's."""
    rows = torch.tensor([[*head, 0.0] for head in ATTENTION])[:, None, None]  # [H, group, w, N]
    values = torch.zeros(2, 5, 2)
    values[0, 1], values[1, 4] = torch.tensor([-1.5, 0.5]), torch.tensor([0.0, 1.0])
    return make_entries(2, 5, window_attention=rows, values=values.tolist())


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
