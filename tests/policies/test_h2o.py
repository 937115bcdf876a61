"""H2O against its oracle and worked numbers."""

from __future__ import annotations

import pytest
import torch

from dmc.budget import Budget
from dmc.policies import H2O


def test_agrees_with_the_oracle(assert_like_oracle, budget, group):
    assert_like_oracle("H2O", budget, group)


@pytest.mark.parametrize("options", [{"recent": 3}, {"recent": 0}, {"recent": 99}, {"normalise": True}])
def test_options_agree_with_the_oracle(assert_like_oracle, options):
    assert_like_oracle("H2O", {"ratio": 3}, **options)


def test_the_lightest_entry_that_is_not_recent_goes(make_entries):
    mass = [old + new for old, new in zip((0.9, 0.3, 0.5, 0.2, 0.0), (0.30, 0.10, 0.20, 0.15, 0.25))]
    entries = make_entries(1, 5, sums={"mass": [mass]})
    assert H2O(budget=Budget(tokens=4)).evicted(entries, torch.tensor([4])).item() == 1


def test_attention_can_be_counted_per_query(make_entries):
    entries = make_entries(1, 3, sums={"mass": [[1.8333, 0.8333, 0.3333]]})
    scores = H2O(budget=Budget(tokens=2), normalise=True).base_scores(entries)
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


def test_a_negative_number_of_recent_entries_is_refused():
    with pytest.raises(ValueError, match="recent=-1: expected a number of entries >= 0, or None for half"):
        H2O(budget=Budget(ratio=2), recent=-1)
