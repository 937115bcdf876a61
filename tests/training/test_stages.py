import math

import pytest

from dmc.compression import CompressionConfig
from dmc.training.config import StageConfig, TrainingConfig
from dmc.training.stages import Plan

FIXED = CompressionConfig(decisions="fixed", weighting="uniform")
PAPER = TrainingConfig(
    stages={
        "zero_out": StageConfig("250 steps"),
        "retrofit": StageConfig("24e9 tokens_per_ratio"),
        "solidify": StageConfig("8e9 tokens", final_fraction=0.1),
    }
)


def test_paper_recipe_has_its_token_counts():
    tokens = 1024 * 4096
    plan = Plan(PAPER, target_ratio=4.0)
    ramp, solidify = math.ceil(72e9 / tokens), round(8e9 / tokens)
    assert plan.total_steps == 250 + ramp + solidify
    assert (ramp, solidify) == (17167, 1907)  # the paper: 18K and 2K steps


def test_stages_follow_each_other_with_their_schedules():
    plan = Plan(
        TrainingConfig(
            stages={
                "zero_out": StageConfig("10 steps"),
                "retrofit": StageConfig("30 steps"),
                "solidify": StageConfig("20 steps", final_fraction=0.1),
            },
            learning_rate=0.2,
        ),
        target_ratio=4.0,
    )
    assert [plan.at(step).neuron_multiplier for step in (0, 4, 8, 9)] == [1.0, 0.5, 0.0, 0.0]
    assert plan.at(10).neuron_multiplier is None
    assert [plan.at(step).target_ratio for step in (10, 20, 30, 40, 59, 99)] == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]
    assert [plan.at(step).stage for step in (9, 10, 39, 40)] == ["zero_out", "retrofit", "retrofit", "solidify"]
    assert plan.at(39).learning_rate == 0.2
    assert plan.at(50).learning_rate == pytest.approx(0.2 * (0.1 + 0.9 * 0.5))
    assert plan.at(59).learning_rate == pytest.approx(0.2 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 19 / 20))))


def test_neuron_is_removed_once_after_zero_out():
    plan = Plan(PAPER, target_ratio=4.0)
    assert [step for step in range(400) if plan.neuron_removed_at(step)] == [250]


def test_snapshots_come_when_the_ramp_reaches_them():
    training = TrainingConfig(stages={"zero_out": StageConfig("10 steps"), "retrofit": StageConfig("30 steps")})
    assert Plan(training, 4.0).snapshot_steps([2.0, 3.0, 4.0]) == {2.0: 20, 3.0: 30}
    assert Plan(training, 1.0).snapshot_steps([]) == {}


def test_a_short_ramp_reaches_several_ratios_in_one_step():
    training = TrainingConfig(stages={"retrofit": StageConfig("2 steps")})
    assert Plan(training, 8.0).ratio_steps([2.0, 3.0, 4.0, 8.0]) == {2.0: 1, 3.0: 1, 4.0: 1, 8.0: 2}


def test_warm_up_rises_linearly():
    training = TrainingConfig(stages={"pretrain": StageConfig("10 steps", warmup_steps=4)}, learning_rate=1.0)
    assert [Plan(training, 1.0).at(step).learning_rate for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_zero_out_after_the_gates_is_refused():
    training = TrainingConfig(stages={"retrofit": StageConfig("1 steps"), "zero_out": StageConfig("1 steps")})
    with pytest.raises(ValueError, match="zero_out removes the neuron"):
        Plan(training, 4.0)


def climbing(fraction, **changes):
    stages = {"zero_out": StageConfig("5 steps"), "retrofit": StageConfig("20 steps", ramp_fraction=fraction)}
    return TrainingConfig(stages={**stages, "solidify": StageConfig("10 steps")}, **changes)


@pytest.mark.parametrize(
    ("fraction", "ratios"), [(None, [1, 2.5, 4]), (1.0, [1, 2.5, 4]), (0.5, [1, 4, 4]), (0.0, [4, 4, 4])]
)
def test_share_of_the_stage_in_which_the_ratio_climbs_is_an_option(fraction, ratios):
    plan = Plan(climbing(fraction), 4.0)
    assert [plan.at(step).target_ratio for step in (5, 15, 25)] == ratios


def test_snapshots_follow_the_shorter_ramp():
    assert Plan(climbing(0.5), 4.0).snapshot_steps([2.0, 3.0]) == {2.0: 9, 3.0: 12}


def test_fixed_decisions_need_no_zero_out_and_start_at_the_target():
    plan = Plan(climbing(None), 4.0, FIXED)
    assert plan.lengths() == [("retrofit", 20), ("solidify", 10)]
    assert {plan.at(step).target_ratio for step in range(30)} == {4.0}
    assert {plan.at(step).neuron_multiplier for step in range(30)} == {None}
    assert not any(plan.neuron_removed_at(step) for step in range(30))
    ramp = Plan(climbing(1.0), 4.0, FIXED)
    assert [ramp.at(step).target_ratio for step in (0, 10, 20)] == [1.0, 2.5, 4.0]


@pytest.mark.parametrize("gate_input", ["neuron", "both", "query", "hidden"])
def test_every_channel_that_attention_loses_is_phased_out(gate_input):
    training = TrainingConfig(stages={"zero_out": StageConfig("10 steps"), "retrofit": StageConfig("5 steps")})
    plan = Plan(training, 4.0, CompressionConfig(gate_input=gate_input))
    assert [name for name, _ in plan.lengths()] == ["zero_out", "retrofit"][gate_input == "hidden" :]


LONG = {"sequence_length": 1000, "batch_size": 7}


@pytest.mark.parametrize(
    "changes",
    [
        {"retrofit": StageConfig("1.1e5 tokens_per_ratio")},
        {"retrofit": StageConfig("1.1e5 tokens_per_ratio", ramp_fraction=0.7)},
        {"retrofit": StageConfig("1.1e5 tokens_per_ratio", ramp_to=8.0, final_fraction=0.1, warmup_steps=3)},
        {"retrofit": StageConfig("97 steps", ramp_to=8.0)},
        {"retrofit": StageConfig("1e6 tokens", ramp_to=8.0, final_fraction=0.5, ramp_fraction=0.5)},
        {"retrofit": StageConfig("97 steps", ramp_to=8.0), "delays": [64, 32, 16]},
    ],
    ids=str,
)
def test_every_target_shares_one_ramp_until_it_is_reached(changes):
    training = {name: value for name, value in changes.items() if name != "retrofit"} | LONG
    stages = {"zero_out": StageConfig("5 steps"), "retrofit": changes["retrofit"], "solidify": StageConfig("9 steps")}
    highest = Plan(TrainingConfig(stages=stages, **training), 8.0)
    for ratio in (1.7, 2.0, 3.3, 4.0, 6.0):
        plan = Plan(TrainingConfig(stages=stages, **training), ratio)
        step = highest.snapshot_steps([ratio])[ratio]
        assert [plan.at(n) for n in range(step)] == [highest.at(n) for n in range(step)]
        assert highest.at(step - 1).target_ratio < ratio <= highest.at(step).target_ratio
        assert plan.at(step).target_ratio == ratio
        if changes["retrofit"].ramp_fraction is None:
            assert plan.lengths() == [("zero_out", 5), ("retrofit", step - 5), ("solidify", 9)]


def test_a_ramp_that_is_not_shared_depends_on_the_target():
    training = TrainingConfig(stages={"retrofit": StageConfig("70 steps")})
    assert [Plan(training, ratio).at(35).target_ratio for ratio in (3.0, 8.0)] == [2.0, 4.5]
