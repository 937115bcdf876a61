"""What different methods have in common: settings under which they keep the same entries."""

from __future__ import annotations

import pytest
import torch

from dmc import Engine, SamplingParams
from dmc.budget import Budget
from dmc.policies import (
    CAKE,
    D2O,
    H2O,
    TOVA,
    VATP,
    AdaKV,
    CaM,
    ExpectedAttention,
    KVzip,
    LAVa,
    LocalWindow,
    Marked,
    PyramidKV,
    Random,
    RoCo,
    SnapKV,
    StreamingLLM,
)

EVICTING = [LocalWindow, StreamingLLM, H2O, TOVA, SnapKV, PyramidKV, AdaKV, CAKE, VATP, RoCo, CaM, D2O, LAVa]
EVICTING += [ExpectedAttention, KVzip, Random, Marked]
BUDGETS = [Budget(ratio=2), Budget(ratio=4), Budget(tokens=24)]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0)


@pytest.fixture
def assert_same(make_stock, make_prompts, scored):
    """Return what compares two policies, over a ragged batch: the same entries, and the same answers from them."""

    def compare(first, second, group=2, model=None, steps=(9, 6)):
        model = model or make_stock(group=group, num_layers=3)
        prompts, continuations = make_prompts(41, 23), make_prompts(*steps, seed=2)
        for one, other in zip(*(scored(model, each, prompts, continuations) for each in (first, second)), strict=True):
            assert one.positions == other.positions
            torch.testing.assert_close(one.log_probs, other.log_probs, rtol=0, atol=1e-5)

    return compare


@pytest.mark.parametrize("method", EVICTING)
@pytest.mark.parametrize("budget", [Budget(tokens=40 + 11), Budget(ratio=1)])
def test_a_budget_of_all_tokens_is_the_full_cache(make_stock, make_prompts, method, budget):
    model, prompts = make_stock(), make_prompts(40, 17, 1)
    full, held = (Engine(model, policy=policy).generate(prompts, GREEDY) for policy in (None, method(budget=budget)))
    for expected, generation in zip(full, held, strict=True):
        assert generation.token_ids == expected.token_ids
        assert generation.logprobs == pytest.approx(expected.logprobs, abs=1e-6)
        assert torch.equal(generation.stats.slots, expected.stats.slots)
        assert generation.stats.achieved_ratio == 1


@pytest.mark.parametrize("budget", BUDGETS)
def test_h2o_with_only_recent_entries_and_streaming_without_sinks_are_a_local_window(assert_same, budget):
    assert_same(H2O(budget=budget, recent=99), LocalWindow(budget=budget))
    assert_same(StreamingLLM(budget=budget, sinks=0), LocalWindow(budget=budget))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("group", [1, 4])
def test_a_flat_pyramid_and_heads_that_do_not_compete_are_snapkv(assert_same, budget, group):
    snapkv = SnapKV(budget=budget, window=8)
    assert_same(PyramidKV(budget=budget, beta=1), snapkv, group)
    assert_same(PyramidKV(budget=budget, beta=1, decay="geometric"), snapkv, group)
    assert_same(AdaKV(budget=budget, window=8, alpha_f=1), snapkv, group)


@pytest.mark.parametrize("budget", BUDGETS)
def test_lava_without_its_values_and_layers_is_adakv(make_stock, assert_same, budget):
    model = make_stock(group=1, num_layers=3)
    with torch.no_grad():
        for layer in model.model.layers:  # all values alike, so that the largest is that of every head
            layer.self_attn.v_proj.weight.zero_()
            layer.self_attn.v_proj.bias = torch.nn.Parameter(torch.ones(layer.self_attn.v_proj.out_features))
    assert_same(LAVa(budget=budget, layer_budget="uniform"), AdaKV(budget=budget, alpha_f=0), model=model)
    assert_same(LAVa(budget=budget, layer_budget="uniform", floor=0.3), AdaKV(budget=budget, alpha_f=0.3), model=model)
    snapkv = SnapKV(budget=budget)
    assert_same(LAVa(budget=budget, layer_budget="uniform", head_budget="equal"), snapkv, model=model)


@pytest.mark.parametrize("budget", BUDGETS)
def test_cake_without_variance_and_with_equal_layers_keeps_snapkvs_entries_when_the_prompt_ends(assert_same, budget):
    snapkv = SnapKV(budget=budget, window=8, pooling="avg", kernel_size=5)
    assert_same(EqualLayers(budget=budget, window=8, gamma=0), snapkv, steps=(1, 1))


class EqualLayers(CAKE):
    """CAKE whose layers all deserve the same."""

    def layer_weight(self, entries, limit):
        return 1.0


@pytest.mark.parametrize("budget", BUDGETS)
def test_vatp_whose_values_all_have_one_norm_is_h2o(make_stock, assert_same, budget):
    model = make_stock(num_layers=3)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.zero_()
            layer.self_attn.v_proj.bias = torch.nn.Parameter(torch.ones(layer.self_attn.v_proj.out_features))
    assert_same(VATP(budget=budget, sinks=0), H2O(budget=budget), model=model)


@pytest.mark.parametrize("budget", [Budget(ratio=2), Budget(ratio=4)])
def test_d2o_that_never_merges_is_h2o_with_sinks_whose_size_is_fixed(monkeypatch, assert_same, budget):
    monkeypatch.setattr(D2O, "_move_threshold", lambda self, memory, *_: memory.fill_(torch.inf))
    assert_same(D2O(budget=budget, allocation="uniform"), ThreeToOne(budget=budget))


class ThreeToOne(H2O):
    """H2O with sinks, and three heavy entries for each recent one; the budget is that of the prompt."""

    grows = False

    def scores(self, entries, budget):
        budget = torch.as_tensor(budget).view(-1)
        sinks = (budget - 2).clamp(max=4)
        recent = budget - sinks - 3 * (budget - sinks) // 4
        stays = entries.among_first(sinks) | entries.among_last(recent)
        return self.base_scores(entries).masked_fill(stays, torch.inf)
