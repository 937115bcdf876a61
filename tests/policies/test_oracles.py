"""The oracles of the training-free methods against numbers worked out by hand, and against stock models."""

from __future__ import annotations

import pytest
import torch
from oracles.policies import METHODS, run
from oracles.policies.cake import preference
from oracles.policies.choices import heavy_and_recent, highest, pool, share_out
from oracles.policies.d2o import clamped_shares, layer_weights, merge_weights, moving_average
from oracles.policies.h2o import merge_probability, value_aware
from oracles.policies.lava import entropy, layer_budgets
from oracles.policies.omnikv import filter_layers_of, is_full, select_scores, selector_weights
from oracles.policies.quest import upper_bound
from oracles.policies.roco import mean_and_deviation
from oracles.policies.snapkv import pyramid_budgets, share_among_heads
from oracles.policies.window import sinks_and_last

ATTENTION = [(0.40, 0.12, 0.09, 0.05), (0.11, 0.10, 0.30, 0.21)]
TIMES_VALUE = [(0.80, 0.24, 0.18, 0.10), (0.11, 0.10, 0.30, 0.21)]


def close(*numbers: float, places: float = 1e-6) -> object:
    return pytest.approx(numbers, abs=places)


def test_streaming_keeps_the_first_two_and_the_last_three_of_ten():
    assert sinks_and_last(10, 5, 2) == [0, 1, 7, 8, 9]


def test_h2o_evicts_the_lightest_entry_that_is_not_recent():
    row, received = (0.30, 0.10, 0.20, 0.15, 0.25), (0.9, 0.3, 0.5, 0.2, 0)
    assert heavy_and_recent([old + new for old, new in zip(received, row)], heavy=2, recent=2) == [0, 2, 3, 4]


def test_tova_evicts_what_the_last_query_attends_to_least():
    assert highest((0.30, 0.10, 0.20, 0.15, 0.25), 4) == [0, 2, 3, 4]


def test_pooling_spreads_a_peak():
    scores = (0, 0, 1, 0, 0, 0, 0.8, 0)
    assert pool(scores, 3, "max") == [0, 1, 1, 1, 0, 0.8, 0.8, 0.8]
    assert pool(scores, 3, "avg") == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 0, 0.8 / 3, 0.8 / 3, 0.8 / 3])


def test_pyramid_loses_nothing_to_rounding():
    assert pyramid_budgets(4, 10, 1000, beta=5) == [18, 13, 7, 2]
    budgets = pyramid_budgets(32, 120, 4000)
    assert (budgets[0], budgets[-1], sum(budgets)) == (234, 6, 3840)


@pytest.mark.parametrize("decay", ["linear", "geometric", "exponential"])
def test_every_pyramid_comes_down_within_the_prompt(decay):
    budgets = pyramid_budgets(6, 50, 110, beta=20, decay=decay)
    assert sum(budgets) == 300 and max(budgets) <= 110 and budgets[0] > 90 and budgets == sorted(budgets, reverse=True)


def test_heads_share_a_layer_by_their_scores():
    scores = [(0.50, 0.30, 0.15, 0.05), (0.20, 0.10, 0.04, 0.01)]
    assert share_among_heads(scores, 4, floor=0) == [[0, 1, 2], [0]]
    assert share_among_heads(scores, 4, floor=2) == [[0, 1], [0, 1]]
    assert share_among_heads(ATTENTION, 3, floor=0) == [[0], [2, 3]]
    assert share_among_heads(TIMES_VALUE, 3, floor=0) == [[0, 1], [2]]


def test_cake_prefers_the_layer_with_spread_and_restless_attention():
    def shares(tau1: float) -> list[float]:
        preferences = [preference(2, 0.01, tau1, 1), preference(4, 0.04, tau1, 1)]
        return [each / sum(preferences) for each in preferences]

    assert [preference(2, 0.01, 1, 1), preference(4, 0.04, 1, 1)] == close(0.02, 0.16)
    assert shares(1) == close(1 / 9, 8 / 9)
    assert shares(2) == close(0.1502, 0.8498, places=5e-5)


def test_vatp_ranks_by_attention_times_value():
    scores = [value_aware(*each) for each in [(0.5, (0.1, 0.0)), (0.3, (0.5, -0.5)), (0.2, (-1.0, 1.0))]]
    assert scores == close(0.05, 0.3, 0.4)


def test_roco_takes_mean_and_deviation_over_the_queries_seen():
    mean, deviation = zip(*map(mean_and_deviation, (0.9, 0.4, 0.5), (0.5, 0.1, 0.25), (3, 2, 1)))
    assert mean == close(0.3, 0.2, 0.5)
    assert deviation == close(0.2769, 0.1, 0, places=5e-5)


def test_cam_merges_with_the_probability_of_relative_attention():
    assert merge_probability(0.2, [0.4, 0.5, 0.3]) == pytest.approx(0.5)
    assert merge_probability(0.9, [0.4]) == 1


def test_d2o_gives_layers_with_even_attention_more():
    weights = layer_weights((0, 0.5, 1), "variance")
    assert clamped_shares(weights, 0.2) == close(0.303888, 0.184318, 0.111794)


def test_d2o_shares_stay_within_their_clamps_and_add_up():
    shares = clamped_shares(layer_weights((1, 2, 10), "variance"), 0.8)
    assert shares == close(1, 1, 0.4)
    shares = clamped_shares(layer_weights((1, 2, 10), "variance"), 0.2)
    assert shares == close(0.59 * 0.7310586, 0.59 * 0.2689414, 0.01)


def test_d2o_merges_with_weights_that_sum_to_one():
    weights = merge_weights([1.0, 0.5])
    assert weights == close(0.383652, 0.383652, 0.232697)
    merged = [sum(weight * number for weight, number in zip(weights, of_axis)) for of_axis in [(2, 4, 0), (0, 0, 4)]]
    assert merged == close(2.301910, 0.930786)


def test_d2o_threshold_follows_the_similarities():
    assert moving_average(0.8, 0.6, beta=0.7) == pytest.approx(0.66)
    assert moving_average(0.66, 0.9, beta=0.7) == pytest.approx(0.828)


@pytest.mark.parametrize(
    ("selector", "expected"),
    [("uniform", (0.9, 1.1, 1.1)), ("exponential", (0.3, 0.5, 0.375)), ("last", (0.3, 0.9, 0.4))],
)
def test_omnikv_selectors_weigh_the_queries(selector, expected):
    weights = [[(0.1, 0.2, 0.7), (0.3, 0.3, 0.4)], [(0.6, 0.1, 0.3), (0.05, 0.9, 0.05)]]
    assert select_scores(weights, selector_weights(2, selector)) == close(*expected)


def test_omnikv_has_eight_full_layers_of_thirty_two():
    assert filter_layers_of(32) == [2, 8, 18]
    assert [layer for layer in range(32) if is_full(layer, [2, 8, 18])] == [0, 1, 2, 3, 8, 9, 18, 19]


def test_lava_entropy_is_scaled_to_one():
    assert entropy([score for row in TIMES_VALUE for score in row]) == pytest.approx(0.866642, abs=1e-6)
    assert entropy([0.5] * 7) == pytest.approx(1) and entropy([0, 1, 0]) == 0


def test_lava_budgets_of_a_layer_shrink_as_more_layers_are_seen():
    seen = [layer_budgets((3, 1, 2)[: num_layers + 1], 12, cap=100) for num_layers in range(3)]
    assert seen == [[12], [9, 3], [6, 2, 4]]


def test_what_a_capped_share_cannot_hold_goes_to_the_others():
    assert share_out([6, 3, 1], 20, cap=8) == [8, 8, 4]


def test_quest_bounds_every_key_of_a_page():
    assert upper_bound((1, -2), (-1, 0), (3, 4)) == 3


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_decoder_gives_the_stock_models_answers(make_stock, make_prompts, family):
    assert_uncompressed(make_stock(family), "LocalWindow", *make_prompts(11, 4), budget={"tokens": 14})


@pytest.mark.parametrize("method", METHODS)
def test_a_ratio_of_one_gives_the_stock_models_answers(make_stock, make_prompts, method):
    assert_uncompressed(make_stock(num_layers=3), method, *make_prompts(11, 4), budget={"ratio": 1})


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("Quest", {"page_size": 4, "dense_layers": 1}),
        ("OmniKV", {"filter_layers": [0]}),
        ("InfLLM", {"block_size": 4, "representatives": 2, "initial": 3, "local": 8, "chunk": 7}),
    ],
)
def test_what_reads_less_holds_everything_and_is_exact_while_all_fits(make_stock, make_prompts, method, options):
    model, (prompt, continuation) = make_stock(num_layers=3), make_prompts(40, 4)
    assert_uncompressed(model, method, prompt, continuation, {"tokens": 43}, **options)
    few, full = (run(model, method, prompt, continuation, {"tokens": tokens}, **options) for tokens in (15, 43))
    assert (few.log_probs[1:] - full.log_probs[1:]).abs().max() > 0.1
    assert few.positions == [[list(range(43))] * 2] * 3


def assert_uncompressed(model, method, prompt, continuation, budget, **options):
    trace = run(model, method, prompt, continuation, budget, **options)
    fed = prompt + continuation[:-1]
    with torch.no_grad():
        logits = model(torch.tensor([fed])).logits[0, len(prompt) - 1 :]
    torch.testing.assert_close(trace.log_probs.float(), logits.log_softmax(-1), rtol=1e-4, atol=1e-4)
    assert (trace.slots == len(fed)).all()
