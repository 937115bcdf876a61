from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles.step_by_step import ModelOracle

from dmc import Engine
from dmc.analysis.decisions import Decisions, collect_decisions, segment_lengths_of

GATES = [
    {"action": "merge", "delay": 0},
    {"action": "merge", "delay": 4},
    {"action": "drop", "delay": 3},
]


def lengths_one_by_one(merged: list[int]) -> list[int]:
    """Walk along one head's decisions."""
    lengths: list[int] = []
    for position, decision in enumerate(merged):
        if position == 0 or not decision:
            lengths.append(1)
        else:
            lengths[-1] += 1
    return lengths


@pytest.fixture(params=GATES, ids=["merge", "delayed merge", "delayed drop"])
def gates(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


def test_decisions_are_those_of_the_algorithm_token_by_token(
    gates: dict[str, Any], make_stock: Any, make_compressed: Any, make_gates: Any, make_prompts: Any
) -> None:
    prompts = make_prompts(20, 20, 20)
    decisions = collect_decisions(make_compressed(gates=gates), torch.tensor(prompts).split(2))
    oracle = ModelOracle(make_stock(), make_gates(**gates))
    for index, prompt in enumerate(prompts):
        run = oracle.run(prompt)
        assert torch.equal(decisions.merged[:, index].long(), run.decisions)
    ratios = torch.stack([20 / oracle.run(prompt).entries for prompt in prompts])
    torch.testing.assert_close(1 / decisions.ratio_by_head(), (1 / ratios).mean(0))


def test_ratio_after_any_length_is_what_the_engine_holds_then(
    gates: dict[str, Any], make_compressed: Any, make_prompts: Any
) -> None:
    model = make_compressed(gates=gates)
    (prompt,) = make_prompts(24)
    lengths = [1, 2, 5, 13, 24]
    ratios = collect_decisions(model, [torch.tensor([prompt])]).ratio_over_length(lengths)
    engine = Engine(model)
    for length, ratio in zip(lengths, ratios, strict=True):
        (scoring,) = engine.score_with_stats([prompt[:length]], [[0]])
        torch.testing.assert_close(ratio, length / scoring.stats.slots.float().mean(1))


def test_segments_have_the_lengths_that_one_counts_by_hand() -> None:
    merged = torch.rand(3, 2, 4, 30, generator=torch.Generator().manual_seed(0)) < 0.6
    merged[..., 0] = False
    for delay in (0, 5):
        counts = Decisions(merged, delay).segment_lengths()
        for layer, row in zip(merged, counts, strict=True):
            heads = layer.flatten(0, 1).tolist()
            lengths = [length for head in heads for length in lengths_one_by_one(head[: 30 - delay])]
            assert row.tolist() == [lengths.count(length) for length in range(counts.shape[1])]
        assert int((counts * torch.arange(counts.shape[1])).sum()) == 3 * 2 * 4 * (30 - delay)


@pytest.mark.parametrize(
    ("merged", "expected"), [([0], [1]), ([0, 1, 1], [3]), ([0, 0, 0], [1, 1, 1]), ([0, 1, 0, 1, 1], [2, 3])]
)
def test_segment_lengths_of_small_cases(merged: list[int], expected: list[int]) -> None:
    assert segment_lengths_of(torch.tensor([merged]).bool()).tolist() == expected == lengths_one_by_one(merged)


def test_sequences_shorter_than_the_delay_have_no_segments_yet() -> None:
    assert Decisions(torch.zeros(2, 1, 1, 4, dtype=torch.bool), delay=6).segment_lengths().sum() == 0


def test_decision_over_position_is_the_mean_over_heads_and_sequences() -> None:
    merged = torch.rand(2, 3, 4, 6, generator=torch.Generator().manual_seed(0)) < 0.5
    shares = Decisions(merged, 0).decision_over_position()
    for layer in range(2):
        for position in range(6):
            members = [bool(merged[layer, b, h, position]) for b in range(3) for h in range(4)]
            assert float(shares[layer, position]) == pytest.approx(sum(members) / 12)


def test_a_stock_model_has_no_decisions(make_stock: Any) -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has no gates"):
        collect_decisions(make_stock(), [torch.tensor([[1, 2]])])
