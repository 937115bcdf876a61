from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles.policies import run

from dmc import Engine, policies
from dmc.analysis.survivors import find_survivors
from dmc.budget import Budget


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("H2O", {}),
        ("TOVA", {}),
        ("StreamingLLM", {}),
        ("SnapKV", {"window": 4}),
        ("PyramidKV", {"window": 4}),
        ("AdaKV", {"window": 4}),
        ("D2O", {}),
    ],
)
@pytest.mark.parametrize("new_tokens", [1, 5])
def test_survivors_are_the_oracles(
    method: str, options: dict[str, Any], new_tokens: int, make_stock: Any, make_prompts: Any
) -> None:
    model = make_stock(num_layers=3)
    prompts = make_prompts(37, 37)
    budget = {"ratio": 2}
    policy = getattr(policies, method)(budget=Budget(**budget), **options)
    engine = Engine(model, policy=policy, kernels="reference")
    survives = find_survivors(engine, prompts, new_tokens)
    assert engine.blocks_in_use == 0 and survives.shape == (2, 3, 2, 36 + new_tokens)
    for prompt, found in zip(prompts, survives, strict=True):
        answer = greedy(model, prompt, method, budget, options, new_tokens)
        trace = run(model, method, prompt, answer, budget, **options)
        held = [[head.nonzero().flatten().tolist() for head in layer] for layer in found]
        assert held == trace.positions
        assert torch.equal(found.sum(-1), trace.slots)


def greedy(
    model: Any, prompt: list[int], method: str, budget: dict[str, Any], options: dict[str, Any], count: int
) -> list[int]:
    """Continue a prompt as the oracle does."""
    tokens: list[int] = []
    for _ in range(count):
        log_probs = run(model, method, prompt, [*tokens, 0], budget, **options).log_probs
        tokens.append(int(log_probs[-1].argmax()))
    return tokens


@pytest.mark.parametrize("policy", [None, policies.OmniKV(budget=Budget(ratio=4), filter_layers=[0])])
def test_who_drops_nothing_has_no_survivors(policy: Any, make_stock: Any, make_prompts: Any) -> None:
    engine = Engine(make_stock(num_layers=3), policy=policy)
    with pytest.raises(ValueError, match="only known of a stock model with a policy that evicts"):
        find_survivors(engine, make_prompts(20))
    assert engine.blocks_in_use == 0


def test_a_session_that_has_not_begun_holds_nothing(make_stock: Any) -> None:
    engine = Engine(make_stock(), policy=policies.H2O(budget=Budget(ratio=2)))
    with engine.session() as session, pytest.raises(ValueError, match="holds nothing: give it a turn first"):
        session.positions_held()


def test_slots_that_merge_are_no_survivors(make_compressed: Any, make_prompts: Any) -> None:
    engine = Engine(make_compressed(), policy=policies.SnapKV(budget=Budget(ratio=2), window=4))
    with pytest.raises(ValueError, match="only known of a stock model"):
        find_survivors(engine, make_prompts(20))
