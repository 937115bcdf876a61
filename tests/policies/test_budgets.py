"""Which entries stay and how budgets are shared out, against loops over lists."""

import itertools
import math
import warnings
from fractions import Fraction

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dmc.budget import rounded_down
from dmc.policies.budgets import (
    effective_window,
    in_proportion,
    keep_pooled,
    keep_top,
    pyramid,
    rounded_cumulatively,
    spread_evenly,
    stepped_down,
    warn_once,
    within,
)
from dmc.policies.d2o import LEAST_SHARE, MOST_SHARE, clamped_shares

FEW = settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
SCORE = st.sampled_from([-math.inf, 0.0, 0.25, 0.5, 1.0, math.inf])  # ties are the normal case after max-pooling
WEIGHTS = st.lists(st.floats(0, 10), min_size=1, max_size=6)


def best(scores, count):
    """Indices of the highest, of equal ones the first; nothing at -inf."""
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    return {index for index in order[: max(count, 0)] if scores[index] > -math.inf}


def marked(keep):
    return set(keep.nonzero().flatten().tolist())


@FEW
@given(
    st.integers(1, 12).flatmap(
        lambda size: st.lists(st.lists(SCORE, min_size=size, max_size=size), min_size=3, max_size=3)
    ),
    st.lists(st.integers(0, 14), min_size=3, max_size=3),
)
def test_the_highest_stay_and_of_equal_ones_the_first(scores, counts):
    every = torch.tensor(scores)
    for row, keep in zip(scores, keep_top(every, counts[0]), strict=True):
        assert marked(keep) == best(row, counts[0])
    for row, count, keep in zip(scores, counts, keep_top(every, torch.tensor(counts)[:, None]), strict=True):
        assert marked(keep) == best(row, count)


@FEW
@given(
    st.integers(1, 8).flatmap(
        lambda size: st.lists(st.lists(SCORE, min_size=size, max_size=size), min_size=2, max_size=3)
    ),
    st.integers(0, 8),
    st.integers(0, 4),
)
def test_heads_compete_above_a_floor(scores, count, floor):
    length = len(scores[0])
    if floor > count or any(row.count(math.inf) > floor for row in scores):
        return
    forced = [[math.inf if index in best(row, floor) else score for index, score in enumerate(row)] for row in scores]
    expected = best([score for row in forced for score in row], count * len(scores))
    keep = keep_pooled(torch.tensor(scores)[None], count, floor)
    assert marked(keep.flatten()) == expected
    for head, row in enumerate(scores):
        assert {head * length + index for index in best(row, floor)} <= expected


@FEW
@given(WEIGHTS, st.floats(0, 40), st.floats(0.5, 20))
def test_shares_are_in_proportion_below_a_cap(weights, total, cap):
    shares = in_proportion(weights, total, cap)
    assert max(shares) <= cap + 1e-9
    assert sum(shares) == pytest.approx(min(total, cap * len(weights)), abs=1e-6)
    free = [(share, weight) for share, weight in zip(shares, weights, strict=True) if share < cap]
    for (share, weight), (other_share, other_weight) in itertools.combinations(free, 2):
        if sum(weight for _, weight in free) > 1e-6:
            assert share * other_weight == pytest.approx(other_share * weight, abs=1e-4)


@pytest.mark.parametrize(
    ("weights", "total", "cap", "expected"),
    [
        ([6, 3, 1], 20, 8, [8, 8, 4]),
        ([3, 1, 2], 12, 100, [6, 2, 4]),
        ([0, 0, 0], 12, 100, [4, 4, 4]),
        ([5, 0, 0], 12, 6, [6, 3, 3]),
        ([1, 1], 30, 10, [10, 10]),
    ],
)
def test_what_a_capped_share_leaves_goes_to_the_others(weights, total, cap, expected):
    assert in_proportion(weights, total, cap) == pytest.approx(expected)


@FEW
@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(0, 100), st.integers(1, 25))
def test_what_is_missing_is_spread_evenly(shares, total, cap):
    filled = [min(share, cap) for share in shares]
    while sum(filled) < total and min(filled) < cap:
        below = [index for index, share in enumerate(filled) if share < cap]
        for index in below[: total - sum(filled)]:
            filled[index] += 1
    ours = spread_evenly(shares, total, cap)
    assert sum(ours) == sum(filled) and max(ours) <= cap
    assert all(abs(our - their) <= 1 for our, their in zip(ours, filled, strict=True))  # whose turn the remainder is


@pytest.mark.parametrize(
    ("shares", "total", "cap", "expected"),
    [([2, 16], 18, 12, [6, 12]), ([2, 2, 2], 8, 9, [3, 3, 2]), ([1, 9, 1], 14, 8, [3, 8, 3]), ([5, 5], 20, 7, [7, 7])],
)
def test_the_remainder_goes_to_the_first(shares, total, cap, expected):
    assert spread_evenly(shares, total, cap) == expected


@FEW
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=6))
def test_layers_have_no_more_than_they_hold_and_the_total_stays(pairs):
    budgets, held = ([pair[side] for pair in pairs] for side in (0, 1))
    fitted = within(budgets, held)
    assert sum(fitted) == sum(budgets)
    if sum(budgets) <= sum(held):
        assert all(ours <= most for ours, most in zip(fitted, held, strict=True))
    else:  # nothing has to go, and there is room
        assert all(ours >= most for ours, most in zip(fitted, held, strict=True))


@pytest.mark.parametrize(
    ("budgets", "held", "expected"),
    [
        ([18, 13, 7, 2], [18, 13, 7, 9], [18, 13, 7, 2]),
        ([20, 10, 5, 5], [12, 30, 30, 30], [12, 14, 7, 7]),
        ([20, 10], [14, 12], [16, 14]),
    ],
)
def test_what_a_layer_does_not_hold_goes_to_the_others_in_proportion(budgets, held, expected):
    assert within(budgets, held) == expected


@FEW
@given(st.lists(st.fractions(0, 20, max_denominator=12), min_size=1, max_size=9))
def test_rounding_keeps_every_partial_sum(shares):
    rounded = rounded_cumulatively(shares)
    for end in range(len(shares) + 1):
        assert sum(rounded[:end]) == round(sum(shares[:end], Fraction(0)))


def test_a_whole_share_survives_its_last_digits():
    assert rounded_down(0.1 * 3 * 10) == rounded_down(3.0000000001) == rounded_down(2.9999999999) == 3
    assert rounded_down(2.999) == 2


@pytest.mark.parametrize("decay", ["linear", "geometric", "exponential"])
@pytest.mark.parametrize(
    ("average", "layers", "beta", "candidates"), [(10, 4, 5, 1000), (50, 6, 20, 110), (7, 5, 1.5, 14), (1, 3, 20, 2)]
)
def test_a_pyramid_falls_and_adds_up(decay, average, layers, beta, candidates):
    budgets = pyramid(average, layers, beta, candidates, decay)
    assert sum(budgets) == average * layers
    assert max(budgets) <= candidates + 1 and min(budgets) >= 0
    assert all(after <= before + 1 for before, after in itertools.pairwise(budgets))  # + 1: rounding


def test_a_linear_pyramid_follows_the_equation():
    assert pyramid(10, 4, 5, 1000) == [18, 13, 7, 2]
    budgets = pyramid(120, 32, 20, 4000)
    assert (budgets[0], budgets[-1], sum(budgets)) == (234, 6, 3840)
    shares = [234 - Fraction(228, 31) * layer for layer in range(32)]
    assert budgets == rounded_cumulatively(shares)
    assert max(abs(budget - share) for budget, share in zip(budgets, shares, strict=True)) < 1


@pytest.mark.parametrize("decay", ["linear", "geometric", "exponential"])
def test_a_pyramid_that_does_not_fit_or_has_one_layer_is_flat(decay):
    assert pyramid(10, 4, 20, 19, decay) == [10] * 4
    assert pyramid(10, 1, 20, 1000, decay) == [10]
    assert pyramid(10, 4, 20, 20, decay)[0] > 10
    assert stepped_down(10, 4, 20, 19) == [10] * 4
    assert pyramid(10, 4, 1, 1000) == stepped_down(10, 4, 1, 1000) == [10] * 4


@FEW
@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=6), st.floats(0.02, 1))
def test_clamped_shares_stay_within_their_clamps_and_keep_their_mean(weights, average):
    shares = clamped_shares(weights, average)
    assert all(LEAST_SHARE - 1e-9 <= share <= MOST_SHARE + 1e-9 for share in shares)
    assert sum(shares) == pytest.approx(average * len(weights))
    free = [i for i, share in enumerate(shares) if LEAST_SHARE + 1e-9 < share < MOST_SHARE - 1e-9]
    for i, j in itertools.combinations(free, 2):
        assert shares[i] * weights[j] == pytest.approx(shares[j] * weights[i], rel=1e-6)


@pytest.mark.parametrize(("window", "limit", "used"), [(32, 64, 32), (32, 63, 31), (32, 24, 12), (8, 1, 1), (8, 3, 1)])
def test_a_window_shrinks_to_half_of_a_small_budget_and_says_so_once(window, limit, used):
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert effective_window(window, limit) == effective_window(window, limit) == used
    texts = [str(warning.message) for warning in seen]
    said = f"window={window} is more than half of a budget of {limit} entries per head: a window of {used} is used"
    assert texts == ([] if used == window else [said])
