"""Quest against its oracle, and the bounds it goes by."""

from __future__ import annotations

import pytest
import torch
from oracles.policies import run

from dmc import Engine
from dmc.budget import Budget
from dmc.policies import Quest
from dmc.policies.quest import upper_bounds

TOLERANCE = 1e-4


def assert_like_oracle(model, prompts, continuations, budget, **options):
    engine = Engine(model, policy=Quest(budget=Budget(**budget), **options))
    for prompt, continuation, scores in zip(prompts, continuations, engine.score(prompts, continuations), strict=True):
        expected = run(model, "Quest", prompt, continuation, budget, **options).log_probs
        torch.testing.assert_close(scores.double(), expected, rtol=0, atol=TOLERANCE)


def test_agrees_with_the_oracle(make_stock, make_prompts, budget, group):
    model = make_stock(group=group, num_layers=4)
    assert_like_oracle(model, make_prompts(63, 41, 23), make_prompts(4, 9, 6, seed=2), budget)


@pytest.mark.parametrize("options", [{"page_size": 4}, {"page_size": 8, "dense_layers": 0}, {"page_size": 1}])
def test_options_agree_with_the_oracle(make_stock, make_prompts, options):
    model = make_stock(num_layers=3)
    assert_like_oracle(model, make_prompts(41, 30), make_prompts(7, 9, seed=2), {"ratio": 3}, **options)


def test_worked_number():
    bound = upper_bounds(torch.tensor([[1.0, -2.0]]), torch.tensor([[-1.0, 0.0]]), torch.tensor([[3.0, 4.0]]))
    assert bound.tolist() == [3.0]


def test_no_key_of_a_page_scores_above_its_bound():
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(5, 40, 16, 8, generator=generator)  # [heads, pages, page, D]
    query = torch.randn(5, 3, 8, generator=generator)
    bounds = upper_bounds(query, keys.amin(2), keys.amax(2))
    scores = torch.einsum("hgd,hpnd->hpn", query, keys)
    assert (bounds[..., None] >= scores - 1e-5).all()
    of_one = keys[:, :, 0]
    torch.testing.assert_close(upper_bounds(query, of_one, of_one), scores[..., 0])


def test_two_keys_come_with_every_page(make_stock, make_prompts):
    model, (prompt,) = make_stock(), make_prompts(64)
    plain, quest = Engine(model), Engine(model, policy=Quest(budget=Budget(ratio=4), page_size=8))
    assert quest.cache.block_bytes == plain.cache.block_bytes * (1 + 2 / (2 * 8))
    (generation,) = quest.generate([prompt])
    (reference,) = plain.generate([prompt])
    assert (generation.stats.slots == reference.stats.slots).all()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"page_size": 0}, "page_size=0: expected a number of entries >= 1"),
        ({"dense_layers": -1}, "dense_layers=-1: expected a number of layers >= 0"),
    ],
)
def test_options_out_of_range_are_refused(options, error):
    with pytest.raises(ValueError, match=error):
        Quest(budget=Budget(ratio=2), **options)


@pytest.mark.parametrize("page_size", [6, 32])
def test_pages_that_do_not_divide_a_block_are_refused(make_stock, page_size):
    with pytest.raises(ValueError, match=f"page_size={page_size}: expected a divisor of block_size=16"):
        Engine(make_stock(), policy=Quest(budget=Budget(ratio=2), page_size=page_size))
