"""Worked numbers of methods that rank tokens one by one: windows, H2O, VATP, RoCo, TOVA, CaM."""

import pytest
import torch

from dmc.budget import Budget
from dmc.policies import H2O, TOVA, VATP, CaM, LocalWindow, RoCo, StreamingLLM


def test_two_sinks_and_the_last_three_of_ten_stay(make_entries):
    keep = StreamingLLM(budget=Budget(tokens=5), sinks=2).keep(make_entries(1, 10), 5)
    assert keep.flatten().nonzero().flatten().tolist() == [0, 1, 7, 8, 9]


@pytest.mark.parametrize(("budget", "kept"), [(1, [9]), (2, [0, 9]), (3, [0, 1, 9]), (5, [0, 1, 2, 3, 9])])
@pytest.mark.filterwarnings("ignore:sinks=4 do not fit")
def test_the_newest_entry_stays_beside_the_sinks(make_entries, budget, kept):
    keep = StreamingLLM(budget=Budget(tokens=budget)).keep(make_entries(1, 10), budget)
    assert keep.flatten().nonzero().flatten().tolist() == kept


def test_a_window_keeps_the_last_entries(make_entries):
    keep = LocalWindow(budget=Budget(tokens=4)).keep(make_entries(2, 10), 4)
    assert keep[0].nonzero()[:, 1].tolist() == 2 * [6, 7, 8, 9]


def test_the_lightest_entry_that_is_not_recent_goes(make_entries, evicted):
    mass = [old + new for old, new in zip((0.9, 0.3, 0.5, 0.2, 0.0), (0.30, 0.10, 0.20, 0.15, 0.25))]
    entries = make_entries(1, 5, sums={"mass": [mass]})
    assert evicted(H2O(budget=Budget(tokens=4)), entries, 4) == [1]


def test_attention_can_be_counted_per_query(make_entries):
    entries = make_entries(1, 3, sums={"mass": [[1.8333, 0.8333, 0.3333]]})
    scores = H2O(budget=Budget(tokens=2), normalize=True).base_scores(entries)
    assert scores.flatten().tolist() == pytest.approx([0.6111, 0.4167, 0.3333], abs=1e-4)


@pytest.mark.parametrize(("budget", "recent", "expected"), [(25, None, 13), (4, None, 2), (1, None, 1), (5, 8, 5)])
def test_half_of_the_budget_is_recent(budget, recent, expected):
    policy = H2O(budget=Budget(tokens=9), recent=recent)
    assert policy.num_recent(budget) == policy.num_recent(torch.tensor([budget])).item() == expected


def test_the_cache_grows_after_the_prompt_where_nothing_is_evicted_while_generating(make_stock, make_prompts, scored):
    model, prompts, continuations = make_stock(), make_prompts(41, 23), make_prompts(9, 6, seed=2)
    evicting, growing = (
        scored(model, H2O(budget=Budget(ratio=4), evict_decoding=evicts), prompts, continuations)
        for evicts in (True, False)
    )
    for index, held in enumerate((10, 5)):
        fed = len(continuations[index]) - 1
        assert (growing[index].slots == held + fed).all()
        assert torch.equal(growing[index].log_probs[0], evicting[index].log_probs[0])
        for heads in growing[index].positions:
            for positions in heads:
                assert positions[held:] == list(range(len(prompts[index]), len(prompts[index]) + fed))


def test_entries_rank_by_attention_times_value(make_entries):
    entries = make_entries(1, 3, sums={"mass": [[0.5, 0.3, 0.2]], "value_norm": [[0.1, 1.0, 2.0]]})
    scores = VATP(budget=Budget(tokens=2)).base_scores(entries)
    assert scores.flatten().tolist() == pytest.approx([0.05, 0.3, 0.4])


@pytest.mark.filterwarnings("ignore:sinks=4 do not fit")
@pytest.mark.parametrize(("budget", "kept"), [(1, [9]), (4, [0, 1, 8, 9]), (8, [0, 1, 2, 3, 6, 7, 8, 9])])
def test_sinks_take_no_more_than_the_heavy_half(make_entries, budget, kept):
    ones = torch.arange(10.0).expand(1, 10)
    keep = VATP(budget=Budget(tokens=1)).keep(
        make_entries(1, 10, sums={"mass": ones.tolist(), "value_norm": ones.tolist()}), budget
    )
    assert keep.flatten().nonzero().flatten().tolist() == kept


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


@pytest.mark.parametrize(
    ("rows", "expected"),
    [([[0.30, 0.10, 0.20, 0.15, 0.25]], [1]), ([[0.1, 0.2, 0.7], [0.5, 0.1, 0.4]], [1, 1]), ([[0.5, 0.4, 0.1]], [2])],
)
def test_what_all_heads_attend_to_least_goes(make_entries, evicted, rows, expected):
    entries = make_entries(len(rows), len(rows[0]), last_attention=rows)
    assert evicted(TOVA(budget=Budget(tokens=1)), entries, len(rows[0]) - 1) == expected
    assert evicted(TOVA(budget=Budget(tokens=1)), entries, len(rows[0])) == [-1] * len(rows)


def test_heads_may_choose_for_themselves_and_spare_the_newest(make_entries, evicted):
    entries = make_entries(2, 3, last_attention=[[0.1, 0.2, 0.7], [0.5, 0.4, 0.1]])
    policy = TOVA(budget=Budget(tokens=2), per_head=True, protect_last=True)
    assert evicted(policy, entries, 2) == [0, 1]


def values_after(policy, entries, age):
    """Let one entry of a single head go; return what its head then holds, [N, D]."""
    leaving = entries.slots.eq(age).expand(entries.positions.shape)
    rewrite, values = policy.merge(entries, leaving, entries.nominal), entries.read_values()[0, 0].clone()
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
