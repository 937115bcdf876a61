"""VATP against its oracle and worked numbers."""

from __future__ import annotations

import pytest
import torch

from dmc.budget import Budget
from dmc.policies import VATP


def test_agrees_with_the_oracle(assert_like_oracle, budget, group):
    assert_like_oracle("VATP", budget, group)


@pytest.mark.parametrize("options", [{"sinks": 0}, {"sinks": 2}, {"sinks": 99}])
def test_sinks_agree_with_the_oracle(assert_like_oracle, options):
    assert_like_oracle("VATP", {"ratio": 3}, **options)


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


@pytest.mark.parametrize(
    ("options", "error"), [({"sinks": -2}, "sinks=-2: expected"), ({"recent": -1}, "recent=-1: expected")]
)
def test_options_out_of_range_are_refused(options, error):
    with pytest.raises(ValueError, match=error):
        VATP(budget=Budget(ratio=2), **options)
