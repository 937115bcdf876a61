"""Every number of a run's settings, with values no run may have: one line that names it and says what is expected."""

import copy
import dataclasses
import math
import re
import typing

import pytest

from dmc.compression import CompressionConfig
from dmc.config import build_config
from dmc.training.config import PlannerConfig, RunConfig, StageConfig

NO_NUMBERS = [math.nan, math.inf, -math.inf, True, "7", [3], {}]
COUNT = [0, -1, 1.5]
RATE = [0, -1e-3, 1e30]
"""Beside what is no number at all: what each setting must not be."""
TABLE = {
    "training.sequence_length": [*COUNT, 1],
    "training.batch_size": COUNT,
    "training.micro_batch_size": COUNT,
    "training.learning_rate": RATE,
    "training.betas": [[0.9], [0.9, 0.95, 0.99], [0.9, 1.0], [-0.1, 0.95], [0.9, math.nan], 0.9],
    "training.adam_eps": [0, -1e-8, 10],
    "training.weight_decay": [-0.1, 1e30],
    "training.gradient_clip": [0, -1, 1e30],
    "training.ratio_weight": [-1, 1e30],
    "training.ratio_control.gain": [0, -1, 1e30],
    "training.ratio_control.max_weight": [1, 0, -1, 1e30],
    "training.distillation.weight": [0, -1, 1.5],
    "training.distillation.temperature": [0, -1, 1e30, 1e-30],
    "training.sensitivity_init.sequences": COUNT,
    "training.sensitivity_init.spread": [0, -1, 1e30],
    "training.sensitivity_init.floor": [0, -1, 1],
    "training.regression_init.sequences": COUNT,
    "training.regression_init.ridge": [0, -1, 1e30],
    "training.delays": [[-1, 4], [1.5, 4], [True, 4], ["2", 4], 4],
    "training.head_agreement_weight": [-1, 1e30],
    "training.snapshot_ratios": [[0], [0.5], [-2], [math.nan], [math.inf], [True], ["2"], 2],
    "training.calibration_sequences": COUNT,
    "training.overfit_sequences": COUNT,
    "training.validation_sequences": COUNT,
    "training.validate_every_steps": COUNT,
    "training.checkpoint_every_steps": COUNT,
    "training.milestones.every_steps": COUNT,
    "training.milestones.ratios": [[0], [0.5], [-2], [math.nan], [math.inf], [True], ["2"], 2],
    "training.log_every_steps": COUNT,
    "training.max_nonfinite_steps": COUNT,
    "training.hang_timeout_minutes": [-1, 1e30],
    "training.stages.retrofit.steps": [*COUNT, 10**18],
    "training.stages.retrofit.tokens": [0, -1, 1e30],
    "training.stages.retrofit.tokens_per_ratio": [0, -1, 1e30],
    "training.stages.retrofit.learning_rate": RATE,
    "training.stages.retrofit.warmup_steps": [-1, 1.5, 10**18],
    "training.stages.retrofit.final_fraction": [-0.1, 1.1],
    "training.stages.retrofit.ramp_fraction": [-0.1, 1.1],
    "training.stages.retrofit.ramp_to": [1, -2],
    "compression.delay": [-1, 1.5],
    "compression.window_size": COUNT,
    "compression.neuron_index": [0.5],
    "compression.decision_offset": [],
    "compression.decision_scale": [0, -1, 1e30],
    "compression.omega_offset": [],
    "compression.eps": [0, -1, 10],
    "compression.temperature": [0, -1, 1e30],
    "compression.target_ratio": [0, 0.5, -4],
    "data.facts.keys": [*COUNT, 58],
    "data.facts.num_keys": COUNT,
    "data.facts.key_words": [*COUNT, 5],
    "data.facts.rebinding": [-0.1, 1.1],
    "data.facts.answer_weight": [0, -1, 1e30],
    "data.facts.random_forms": [-0.1, 1.1],
    "data.facts.asked_last": [-0.1, 1.1],
    "data.facts.asked_twice": [-0.1, 1.1],
    "data.facts.lessons.length": COUNT,
    "data.facts.lessons.sequences": COUNT,
    "data.facts.lessons.keys": COUNT,
    "data.facts.lessons.of_keys": COUNT,
    "data.stream_shards": COUNT,
    "data.num_workers": [-1, 1.5, 10**6],
    "data.tokenize_num_proc": [*COUNT, 10**6],
    "data.tokenizer.train_vocab_size": [*COUNT, 256, 10**12],
    "model.merge_kv_heads": COUNT,
    "trainer.devices": [0, -1, 1.5, "0", "-1", "0,1", "all"],
    "trainer.num_nodes": COUNT,
    "trainer.tensor_parallel_size": COUNT,
    "trainer.context_parallel_size": COUNT,
    "trainer.shard_size": COUNT,
    "trainer.peak_teraflops": [0, -1, 1e30],
    "planner.device_memory_gib": [0, -1, 1e30],
    "planner.utilization": [0, -1, 1.5],
    "seed": [-1, 1.5, 2**32],
}
LISTS = ("training.delays", "training.milestones.ratios", "training.snapshot_ratios")
CASES = [
    (path, value)
    for path, values in TABLE.items()
    for value in [*(each for each in NO_NUMBERS if not (path == "trainer.devices" and each == "7")), *values]
    if not (isinstance(value, list) and value == [3] and path in LISTS)
]
VALID = {
    "model": {"path": "somewhere"},
    "data": {
        "train": {"x": {"_target_": "x"}},
        "validation": {"x": {"_target_": "x"}},
        "tokenizer": {"folder": "somewhere"},
    },
    "training": {
        "stages": {"retrofit": {"steps": 5}},
        "ratio_control": {},
        "distillation": {},
        "sensitivity_init": {},
        "milestones": {},
    },
    "compression": {"delay": 4, "gate_input": "hidden"},
    "planner": {},
    "trainer": {},
}


def settings_with(path, value):
    """Build the settings of a run, or of a plan, with one of them changed."""
    values = copy.deepcopy(VALID)
    *folders, last = path.split(".")
    place = values
    for folder in folders:
        lesson = {"kind": "facts", "length": 64, "sequences": 2}
        place = place.setdefault(folder, {}) if folder != "lessons" else place.setdefault(folder, [lesson])[0]
    if last in ("tokens", "tokens_per_ratio"):
        del place["steps"]
    place[last] = value
    planner = values.pop("planner")
    return (
        build_config(PlannerConfig, planner, "planner") if folders == ["planner"] else build_config(RunConfig, values)
    )


@pytest.mark.parametrize(("path", "value"), CASES, ids=lambda each: str(each) if isinstance(each, str) else repr(each))
def test_a_number_out_of_its_bounds_is_refused_in_one_line_that_names_it(path, value):
    with pytest.raises(ValueError) as refused:
        settings_with(path, value)
    said = str(refused.value)
    assert path.rpartition(".")[2] in said and "\n" not in said and len(said) < 300
    assert re.search("expected|is missing|give exactly one|is not a compression ratio", said), said


def numeric_fields(config_class, prefix=""):
    """Find every field of a configuration that holds a number, in the classes inside it too."""
    found = set()
    for name, hint in typing.get_type_hints(config_class).items():
        inner = {
            hint,
            *typing.get_args(hint),
            *(part for each in typing.get_args(hint) for part in typing.get_args(each)),
        }
        if {int, float} & inner:
            found.add(prefix + name)
        for each in inner:
            if dataclasses.is_dataclass(each):
                found |= numeric_fields(each, f"{prefix}{name}.{'retrofit.' if each is StageConfig else ''}")
    return found


def test_the_table_has_every_number_of_a_run_and_of_a_plan():
    assert set(TABLE) == numeric_fields(RunConfig) | numeric_fields(PlannerConfig, "planner.")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("training.gradient_clip", None), ("compression.window_size", None), ("trainer.devices", "auto"),
        ("trainer.devices", "8"), ("training.stages.retrofit.tokens", 1e9), ("training.weight_decay", 0),
        ("training.hang_timeout_minutes", 0), ("data.num_workers", 0), ("compression.decision_offset", 1e6),
        ("compression.decision_offset", -3),
    ],
)  # fmt: skip
def test_a_number_on_its_bounds_is_taken(path, value):
    settings_with(path, value)


@pytest.mark.parametrize("name", [item.name for item in dataclasses.fields(CompressionConfig)])
def test_gates_of_a_folder_may_not_be_null_where_a_number_is_due(name):
    if name == "window_size":
        assert CompressionConfig.from_dict({name: None}).window_size is None
        return
    with pytest.raises(ValueError, match=f"{name}=None"):
        CompressionConfig.from_dict({name: None})


def test_gates_that_are_no_mapping_are_refused():
    with pytest.raises(ValueError, match=r"compression=\[1\]: expected a mapping"):
        CompressionConfig.from_dict([1])
