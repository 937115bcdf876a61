"""The paper's ablations and baselines from a base to a served folder."""

import dataclasses

import pytest
import torch
from launching import logged, logged_losses

from dmc import Engine, SamplingParams
from dmc.config import build_config
from dmc.models import load_model
from dmc.training.config import PlannerConfig, RunConfig
from dmc.training.planning.planner import plan_training
from dmc.training.run import train

FIXED = {"decisions": "fixed", "weighting": "uniform", "window_size": None, "target_ratio": 4.0}


def served(folder, length=30):
    """Slots [L, H] after a prompt of random tokens."""
    prompt = torch.randint(300, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    (generation,) = Engine(load_model(folder)).generate([prompt], SamplingParams(max_new_tokens=1, temperature=0.0))
    return generation.stats.slots


def test_fixed_pooling_trains_without_zero_out_and_holds_its_ratio(run_values):
    run_values["compression"] = FIXED
    config = build_config(RunConfig, run_values)
    run = train(config)
    losses = logged_losses(run.folder)
    assert sorted(losses) == list(range(6))  # of 2 + 4 + 2 steps
    assert [stage.name for stage in plan_training(config, PlannerConfig()).stages] == ["retrofit", "solidify"]
    model = load_model(run.final)
    assert model.compression == config.compression
    assert "decision_offset" not in run.metrics(run.final)
    assert run.metrics(run.final)["achieved_ratio"] == 4.0  # of sequences of 32
    assert (served(run.final, 33) == 9).all()


def test_fixed_pooling_may_climb_through_snapshots(run_values):
    run_values["compression"] = FIXED
    run_values["training"] |= {
        "stages": {"retrofit": {"length": "4 steps", "ramp_fraction": 1.0}},
        "snapshot_ratios": [2.0],
    }
    run = train(build_config(RunConfig, run_values))
    assert {ratio: load_model(folder).compression.target_ratio for ratio, folder in run.snapshots.items()} == {2.0: 2.0}
    assert (served(run.snapshots[2.0]) == 15).all()
    assert (served(run.final) == 8).all()


def test_heads_that_decide_as_one_train_and_serve(run_values):
    run_values["compression"] |= {"decisions": "per_layer", "decision_offset": 0.0}
    run_values["training"] |= {"ratio_prior": "local"}
    run = train(build_config(RunConfig, run_values))
    assert load_model(run.final).compression.decisions == "per_layer"
    slots = served(run.final)
    assert (slots == slots[:, :1]).all()


def test_a_target_of_decisions_is_met_beyond_what_the_delay_lets_a_cache_reach(run_values):
    run_values["compression"] |= {"action": "drop", "delay": 16, "gate_input": "query", "decided_token": "previous"}
    with pytest.raises(ValueError, match=r"of training\.sequence_length=32 tokens every head holds at least 17"):
        build_config(RunConfig, run_values)
    run_values["compression"] |= {"target_counts": "decided", "decision_scale": 20.0}
    run = train(build_config(RunConfig, run_values))
    assert sorted(logged(run.folder, "train/neuron_multiplier")) == [0, 1]  # as with a neuron of the key
    metrics, compression = run.metrics(run.final), load_model(run.final).compression
    assert (compression.target_counts, compression.target_ratio) == ("decided", 4.0)
    assert metrics["decided_ratio_on_calibration_text"] == pytest.approx(4.0, rel=0.1)
    for kind in ("train", "validation"):
        held, decided = (logged(run.folder, f"{kind}/{name}_ratio") for name in ("achieved", "decided"))
        assert sorted(held) == sorted(decided) and all(held[step] <= min(decided[step], 32 / 17) for step in held)
    assert decided[max(decided)] > 1.5
    assert (served(run.final, 32) >= 17).all()


def test_uniform_weights_an_immediate_target_and_heads_pulled_to_one_decision_train(run_values):
    run_values["compression"] |= {"weighting": "uniform", "window_size": None, "neuron_index": 0}
    zero_out, retrofit = (run_values["training"]["stages"][name] for name in ("zero_out", "retrofit"))
    stages = {"zero_out": zero_out, "retrofit": {**retrofit, "ramp_fraction": 0.0}}
    agreement = {"head_agreement_weight": 1.0, "head_agreement": "ratio"}
    run_values["training"] |= {"stages": stages, **agreement}
    run = train(build_config(RunConfig, run_values))
    assert logged(run.folder, "train/target_ratio") == dict.fromkeys(range(2, 6), 4.0)
    losses = logged(run.folder, "train/head_agreement_loss")
    assert sorted(losses) == list(range(2, 6)) and min(losses.values()) > 0  # from the end of zero-out on


@pytest.fixture
def base(run_values):
    """Train a stock base of two KV heads."""
    values = {**run_values, "compression": None, "output_dir": run_values["output_dir"] + "_base"}
    values["training"] = {**values["training"], "stages": {"pretrain": {"length": "2 steps"}}}
    return train(build_config(RunConfig, values)).final


def test_merged_heads_are_trained_on_as_the_control_of_a_retrofit(run_values, base):
    run_values |= {"model": str(base), "merge_kv_heads": 1}
    run_values["control"] = True
    run_values["training"]["snapshot_ratios"] = [2.0]
    config = build_config(RunConfig, run_values)
    unmerged = dataclasses.replace(config, merge_kv_heads=None)
    plans = [plan_training(run, PlannerConfig()) for run in (config, unmerged)]
    weights = 2 * 2 * 8 * 32  # k and v of one head fewer, in two layers
    assert plans[1].num_weights - plans[0].num_weights == weights
    assert plans[0].steps == plans[1].steps
    run = train(config)
    assert sorted(logged_losses(run.folder)) == list(range(8)) and run.snapshots == {}
    model = load_model(run.final)
    assert (model.config.model_type, model.config.num_key_value_heads) == ("llama", 1)
    assert "with 1 KV heads" in (run.final / "README.md").read_text()
    assert served(run.final).tolist() == [[30], [30]]


def test_merged_heads_may_learn_gates_too(run_values, base):
    run_values |= {"model": str(base), "merge_kv_heads": 1}
    run = train(build_config(RunConfig, run_values))
    assert served(run.final).shape == (2, 1)


def test_heads_that_cannot_be_merged_so_are_named_before_anything_is_written(run_values, base):
    run_values |= {"model": str(base), "merge_kv_heads": 3}
    config = build_config(RunConfig, run_values)
    with pytest.raises(
        ValueError, match="2 KV heads cannot be merged into 3 groups of equal size: expected one of 1, 2"
    ):
        plan_training(config, PlannerConfig())
    with pytest.raises(ValueError, match="2 KV heads cannot be merged into 3 groups of equal size"):
        train(config)
