import pytest
from composing import changed

from dmc.config import build_config
from dmc.training.config import RunConfig, StageConfig

VALID = {
    "model": "somewhere",
    "data": {"train": {"x": {"_target_": "x"}}, "validation": {"x": {"_target_": "x"}}},
    "training": {"stages": {"retrofit": {"length": "5 steps"}}, "betas": [0.9, 0.99]},
    "compression": {"delay": 4},
}


def test_plain_values_become_dataclasses():
    config = build_config(RunConfig, VALID)
    assert config.compression.delay == 4
    assert config.training.stages["retrofit"].num_steps(100, 4.0) == 5
    assert config.training.betas == (0.9, 0.99)
    assert config.has_gates


@pytest.mark.parametrize(
    ("length", "steps"),
    [("250 steps", 250), ("1e3 tokens", 10), ("1K tokens", 10), ("1.5M tokens_per_ratio", 45000), ("1 tokens", 1)],
)
def test_a_length_has_a_unit(length, steps):
    assert StageConfig(length).num_steps(tokens_per_step=100, target_ratio=4.0) == steps


@pytest.mark.parametrize(
    "length", ["5", "5 stepz", "0 steps", "1.5 steps", "-5 steps", "steps", "1e16 tokens", "5  steps"]
)
def test_other_lengths_are_refused(length):
    with pytest.raises(ValueError, match=r"^length=.*: expected a number and its unit: '250 steps'"):
        StageConfig(length)


def test_a_window_beyond_the_ratio_is_refused_unless_decisions_alone_count():
    wide = changed(VALID, {"compression.delay": 512, "compression.target_ratio": 8.0})
    with pytest.raises(ValueError, match=r"every head holds at least 513; .* or compression\.target_counts=decided"):
        build_config(RunConfig, wide)
    assert build_config(RunConfig, changed(wide, {"compression.target_counts": "decided"})).target_ratio == 8


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "compression.delay",
            1024,
            "=4 is out of reach: of training.sequence_length=4096 tokens every head holds at least 1025",
        ),
        ("trainer", {"tensor_parallel_size": 2}, "size=2 needs trainer.strategy=fsdp2 or hsdp, not auto"),
        ("trainer", {"context_parallel_size": 2}, "size=2 needs trainer.strategy=ddp or fsdp2 or hsdp, not auto"),
        (
            "trainer",
            {"context_parallel_size": 2, "strategy": "deepspeed_zero3"},
            "context_parallel_size=2 needs trainer.strategy=ddp or .*, not deepspeed_zero3",
        ),
        (
            "trainer",
            {"context_parallel_size": 3, "strategy": "fsdp2"},
            "sequence_length=4096 cannot be divided among the 3 devices of trainer.context_parallel_size",
        ),
        ("trainer", {"shard_size": 2}, "trainer.shard_size=2 needs trainer.strategy=hsdp, not auto"),
        ("trainer", {"accumulate_locally": True}, "accumulate_locally=true needs trainer.strategy=fsdp2 or hsdp, not"),
        ("trainer", {"offload_optimizer": True}, "needs trainer.strategy=deepspeed_zero1 or .*, not auto"),
        (
            "trainer",
            {"offload_parameters": True, "strategy": "deepspeed_zero2"},
            "offload_parameters=true needs trainer.strategy=deepspeed_zero3, not deepspeed_zero2",
        ),
        ("trainer.strategy", "fsdp", "strategy='fsdp': expected 'auto', 'ddp', 'fsdp2', 'hsdp', 'deepspeed_zero1'"),
        ("compression", {"action": "drop"}, "action='drop' needs delay >= 1"),
        ("training.stages", {}, "training.stages is empty"),
        ("training.stages", {"retrofit": {}}, "setting training.stages.retrofit.length is missing"),
        (
            "training.stages",
            {"polish": {"length": "1 steps"}},
            "unknown setting training.stages.polish: expected one of",
        ),
        ("trainer.tensor_paralel_size", 2, "did you mean 'tensor_parallel_size'"),
        (
            "trainer.lightning",
            {"limit_val_batches": 2},
            "limit_val_batches is set by the run itself: use training.valid",
        ),
        ("trainer.lightning", {"devices": 2}, "use trainer.devices"),
        (
            "trainer",
            {"compile": True, "strategy": "deepspeed_zero3"},
            "trainer.compile=true with .*: use fsdp2|use fsdp2",
        ),
        ("training.snapshot_ratios", [8.0], r"training.snapshot_ratios=\[8.0\] lie above"),
        ("training.milestones.ratios", [8.0], r"training.milestones.ratios=\[8.0\] lie above"),
        ("model", None, "no model: give model=DIR"),
        ("data", {"train": {}, "validation": {"x": {}}}, "data.train={.*}: expected at least 1 item"),
        ("data", {"train": {"x": None}, "validation": {"x": {}}}, "data.train={.*}: expected at least 1 item"),
        ("data", {"train": {"x": {}}}, "setting data.validation is missing"),
        (
            "training.stages",
            {"retrofit": {"length": "1 steps", "ramp_fraction": 1.5}},
            "ramp_fraction=1.5: expected less than or equal to 1",
        ),
        ("training.stages", {"solidify": {"length": "1 steps", "ramp_fraction": 0}}, "for the retrofit stage only"),
        ("training.stages", {"solidify": {"length": "1 steps", "ramp_to": 8}}, "for the retrofit stage only"),
        (
            "training.stages",
            {"retrofit": {"length": "1 steps", "ramp_to": 2}},
            "ramp_to=2 ends below compression.target_ratio=4",
        ),
        ("model", {"path": "a"}, "model={'path': 'a'}: expected a valid string"),
        (
            "data",
            {**VALID["data"], "facts": {"keys": 4}},
            "whole_documents with data.facts: whole documents are packed from cached text without facts",
        ),
        (
            "data",
            {**VALID["data"], "streaming": True},
            "whole_documents with data.streaming: whole documents are packed",
        ),
        ("training.head_agreement_weight", 0.1, "whole_documents with training.head_agreement_weight, which"),
        ("training.regression_init", {}, "whole_documents with training.regression_init, which would count"),
    ],
)
def test_bad_settings_give_one_clear_error(path, value, message):
    changes = {path: value} | ({"training.whole_documents": True} if "whole_documents" in message else {})
    with pytest.raises(ValueError, match=message):
        build_config(RunConfig, changed(VALID, changes))


def test_batch_must_divide_over_devices():
    training = build_config(RunConfig, changed(VALID, {"training.micro_batch_size": 3})).training
    with pytest.raises(ValueError, match=r"batch_size=1024 is not a multiple of micro_batch_size \* devices = 3 \* 2"):
        training.accumulation(2)


def test_deepspeed_refuses_bfloat16_weights():
    values = changed(VALID, {"trainer.strategy": "deepspeed_zero2", "dtype": "bfloat16"})
    with pytest.raises(ValueError, match=r"dtype=float32 and trainer.precision=bf16-mixed"):
        build_config(RunConfig, values)


FIXED = {"decisions": "fixed", "weighting": "uniform"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"compression": {"decisions": "per_layer"}, "training.head_agreement_weight": 1.0},
            "decisions=per_layer: heads",
        ),
        ({"compression": FIXED, "training.head_agreement_weight": 1.0}, "always agree; use weight 0"),
        ({"compression": FIXED, "training.gates_only": True}, "training.gates_only with compression.decisions=fixed"),
        (
            {"compression": FIXED, "training.ratio_control": {}},
            "training.ratio_control with compression.decisions=fixed",
        ),
        ({"compression": FIXED, "training.snapshot_ratios": [2.0]}, "need a target that climbs through them"),
        ({"compression": {**FIXED, "action": "drop", "delay": 2}}, "it cannot drop them"),
    ],
)
def test_settings_that_contradict_each_other_give_one_clear_error(changes, message):
    with pytest.raises(ValueError, match=message):
        build_config(RunConfig, changed(VALID, changes))


def test_snapshots_of_fixed_pooling_need_a_ramp():
    values = changed(VALID, {"compression": FIXED})
    values["training"] |= {
        "stages": {"retrofit": {"length": "5 steps", "ramp_fraction": 1.0}},
        "snapshot_ratios": [2.0],
    }
    assert build_config(RunConfig, values).decisions == "fixed"
