"""InfLLM against its oracle."""

from __future__ import annotations

import pytest
import torch
from oracles.policies import run

from dmc import Engine
from dmc.budget import Budget
from dmc.policies import InfLLM
from dmc.policies.infllm import block_relevance

TOLERANCE = 1e-4
SMALL = {"block_size": 4, "representatives": 2, "initial": 2, "local": 6, "chunk": 8}


def assert_like_oracle(model, prompts, continuations, budget, **options):
    engine = Engine(model, policy=InfLLM(budget=Budget(**budget), **options))
    for prompt, continuation, scores in zip(prompts, continuations, engine.score(prompts, continuations), strict=True):
        expected = run(model, "InfLLM", prompt, continuation, budget, **options).log_probs
        torch.testing.assert_close(scores.double(), expected, rtol=0, atol=TOLERANCE)


def test_agrees_with_the_oracle(make_stock, make_prompts, budget, group):
    model = make_stock(group=group, num_layers=2)
    assert_like_oracle(model, make_prompts(41, 23), make_prompts(9, 6, seed=2), budget, **SMALL)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 16, "representatives": 4, "initial": 3, "local": 5},  # as large as the cache's blocks
        {"block_size": 24, "initial": 0, "chunk": 5},  # larger
        {"block_size": 3, "representatives": 1, "chunk": 64},
        {"local": 1, "representatives": 4},
    ],
)
def test_options_agree_with_the_oracle(make_stock, make_prompts, changes):
    options = {**SMALL, **changes}
    assert_like_oracle(make_stock(), make_prompts(60, 20), make_prompts(5, 9, seed=2), {"ratio": 4}, **options)


def test_generated_tokens_become_blocks(make_stock, make_prompts):
    assert_like_oracle(make_stock(), make_prompts(7, 12), make_prompts(40, 30, seed=2), {"tokens": 14}, **SMALL)


def test_relevance_is_summed_over_query_heads():
    query = torch.tensor([[[[1.0, 0.0], [0.0, 2.0]], [[1.0, 1.0], [-1.0, 1.0]]]])  # [1, 2 heads, 2 of a group, 2]
    keys = torch.tensor([[[[1.0, 1.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 3.0]]]])
    assert block_relevance(query, keys).tolist() == [[3.0 + 0.0, 2.0 + 6.0]]


def test_the_papers_setting_is_a_budget():
    policy = InfLLM(budget=Budget(tokens=8320))
    assert policy.num_blocks(10**6) == 32
    assert (policy.num_complete(4224), policy.num_complete(4351), policy.num_complete(4352)) == (0, 0, 1)
    assert InfLLM(budget=Budget(tokens=10)).num_blocks(10**6) == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"block_size": 0}, "block_size=0: expected a whole number >= 1"),
        ({"local": 0}, "local=0: expected a whole number >= 1"),
        ({"chunk": 0}, "chunk=0: expected a whole number >= 1"),
        ({"initial": -1}, "initial=-1: expected a number of tokens >= 0"),
        ({"block_size": 4, "representatives": 5}, "representatives=5: a block has 4 tokens"),
    ],
)
def test_options_out_of_range_are_refused(options, error):
    with pytest.raises(ValueError, match=error):
        InfLLM(budget=Budget(ratio=2), **options)


def test_prompts_cut_inside_a_chunk_are_refused(make_stock):
    with pytest.raises(ValueError, match="prefill_chunk_size=100: InfLLM takes 512 tokens of a prompt together"):
        Engine(make_stock(), policy=InfLLM(budget=Budget(ratio=2)), prefill_chunk_size=100)
