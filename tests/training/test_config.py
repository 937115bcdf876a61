import pytest
from composing import changed

from dmc.config import build_config
from dmc.training.config import RunConfig

VALID = {
    "model": {"path": "somewhere"},
    "data": {"train": {"x": {"_target_": "x"}}, "validation": {"x": {"_target_": "x"}}},
    "training": {"stages": {"retrofit": {"steps": 5}}, "betas": [0.9, 0.99]},
    "compression": {"delay": 4},
}


def test_plain_values_become_dataclasses():
    config = build_config(RunConfig, VALID)
    assert config.compression.delay == 4
    assert config.training.stages["retrofit"].num_steps(100, 4.0) == 5
    assert config.training.betas == (0.9, 0.99)
    assert config.has_gates


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
        ("training.learning_rte", 1, "unknown setting training.learning_rte: did you mean 'learning_rate'"),
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
        ("compression.action", "forget", "compression.action='forget': expected 'merge' or 'drop'"),
        ("compression", {"action": "drop"}, "action='drop' needs delay >= 1"),
        ("training.stages", {}, "training.stages is empty"),
        ("training.stages", {"retrofit": {}}, "training.stages.retrofit: .*give exactly one of them, > 0"),
        ("training.stages", {"retrofit": {"steps": 1, "tokens": 5.0}}, "give exactly one of them, > 0"),
        ("training.stages", {"polish": {"steps": 1}}, "unknown setting training.stages.polish: expected one of"),
        ("training.batch_size", "many", "training.batch_size='many': expected a valid integer"),
        ("logger.csv", 1, "logger.csv=1: expected a mapping"),
        ("trainer.tensor_paralel_size", 2, "did you mean 'tensor_parallel_size'"),
        ("trainer.limit_val_batches", 2, "trainer.limit_val_batches=2 .* use training.validation_sequences"),
        ("trainer.callbacks", [], "use callbacks.NAME._target_"),
        (
            "trainer",
            {"compile": True, "strategy": "deepspeed_zero3"},
            "trainer.compile=true with .*: use fsdp2|use fsdp2",
        ),
        ("training.snapshot_ratios", [8.0], r"training.snapshot_ratios=\[8.0\] lie above"),
        ("training.milestones.ratios", [8.0], r"training.milestones.ratios=\[8.0\] lie above"),
        ("model", {}, "give exactly one of them"),
        ("model", {"path": "a", "fresh": {}}, "give exactly one of them"),
        ("data", {"train": {}, "validation": {"x": {}}}, "data.train={.*}: expected at least 1 item"),
        ("data", {"train": {"x": None}, "validation": {"x": {}}}, "data.train={.*}: expected at least 1 item"),
        ("data", {"train": {"x": 5}, "validation": {"x": {}}}, "data.train.x=5: expected a mapping"),
        ("data", {"train": [{}], "validation": {"x": {}}}, "data.train=.*: expected a mapping"),
        ("data", {"train": {"x": {}}}, "setting data.validation is missing"),
        ("training.ratio_prior", "layer", "training.ratio_prior='layer': expected 'global' or 'local'"),
        ("training.head_agreement", "sum", "training.head_agreement='sum': expected 'mean' or 'ratio'"),
        (
            "training.stages",
            {"retrofit": {"steps": 1, "ramp_fraction": 1.5}},
            "ramp_fraction=1.5: expected less than or equal to 1",
        ),
        ("training.stages", {"solidify": {"steps": 1, "ramp_fraction": 0}}, "for retrofit stages only"),
        ("training.stages", {"solidify": {"steps": 1, "ramp_to": 8}}, "for retrofit stages only"),
        (
            "training.stages",
            {"retrofit": {"steps": 1, "ramp_to": 2}},
            "ramp_to=2 ends below compression.target_ratio=4",
        ),
        ("model", {"fresh": {}, "merge_kv_heads": 2}, "model.merge_kv_heads=2 merges the heads of a trained model"),
        ("trainer.precision", "fp8", "trainer.precision='fp8': expected '32-true' or"),
        ("data", 3, "data=3: expected a mapping"),
    ],
)
def test_bad_settings_give_one_clear_error(path, value, message):
    with pytest.raises(ValueError, match=message):
        build_config(RunConfig, changed(VALID, {path: value}))


def test_batch_must_divide_over_devices():
    training = build_config(RunConfig, changed(VALID, {"training.micro_batch_size": 3})).training
    with pytest.raises(ValueError, match=r"batch_size=1024 is not a multiple of micro_batch_size \* devices = 3 \* 2"):
        training.accumulation(2)


def test_deepspeed_refuses_bfloat16_weights():
    values = changed(VALID, {"trainer.strategy": "deepspeed_zero2", "model.dtype": "bfloat16"})
    with pytest.raises(ValueError, match=r"model.dtype=float32 and trainer.precision=bf16-mixed"):
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
    values["training"] |= {"stages": {"retrofit": {"steps": 5, "ramp_fraction": 1.0}}, "snapshot_ratios": [2.0]}
    assert build_config(RunConfig, values).decisions == "fixed"
