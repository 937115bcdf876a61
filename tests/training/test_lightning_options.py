"""What a run takes of Lightning and torch: Trainer arguments, callbacks, loggers, compiled regions, a profile."""

import dataclasses
import inspect
import json
from types import SimpleNamespace

import pytest
from launching import logged_losses
from lightning import Trainer

from dmc.config import build_config
from dmc.training.config import RunConfig, TrainerConfig
from dmc.training.config.trainer import ELSEWHERE
from dmc.training.run import train
from dmc.training.text_data import TextData, build_tokenizer

SHORT = {"stages": {"retrofit": {"length": "3 steps"}}, "calibrate": False, "validate_every_steps": 100}


def test_every_argument_of_the_trainer_is_passed_on_or_refused_with_what_takes_its_place():
    refused = [name for names in ELSEWHERE.values() for name in names]
    assert len(refused) == len({*refused}) and {*refused} <= {*inspect.signature(Trainer).parameters}
    for name in inspect.signature(Trainer).parameters:
        if name in TrainerConfig.__dataclass_fields__:
            continue
        if name in refused:
            with pytest.raises(ValueError, match=f"trainer.lightning.{name} is set by the run itself: use "):
                TrainerConfig(lightning={name: 1})
        else:
            config = TrainerConfig(num_nodes=2, lightning={name: 1})
            assert build_config(TrainerConfig, json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_options_of_the_trainer_callbacks_and_a_profile_reach_a_run(run_values, tmp_path):
    folder = tmp_path / "run"
    run_values["training"] |= SHORT
    lightning = {"detect_anomaly": True, "enable_progress_bar": False, "profiler": "pytorch"}
    run_values["trainer"] |= {"lightning": lightning}
    run_values["callbacks"] = {
        "stats": {"_target_": "lightning.pytorch.callbacks.DeviceStatsMonitor", "cpu_stats": False},
    }  # fmt: skip
    run_values["logger"] = {"csv": {"_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": str(folder),
                                    "name": "logs", "prefix": "mine"}}  # fmt: skip
    train(build_config(RunConfig, run_values))
    assert "mine-train/loss" in (folder / "logs" / "version_0" / "metrics.csv").read_text()
    (trace,) = (folder / "logs" / "version_0").glob("*.pt.trace.json")
    assert any("aten::" in str(event.get("name")) for event in json.loads(trace.read_text())["traceEvents"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"callbacks": {"x": {}}}, "callbacks.x has no _target_"),
        ({"callbacks": {"x": {"_target_": "dmc.data.TextSource", "name": "a"}}}, "callbacks.x is TextSource: expected"),
        (
            {"callbacks": {"x": {"_target_": "lightning.pytorch.callbacks.Timer", "durat": 1}}},
            "unexpected keyword argument 'durat'",
        ),
        ({"logger": {"x": {"_target_": "dmc.data.TextSource", "name": "a"}}}, "logger.x is TextSource: expected"),
        ({"training": {**SHORT, "overfit_sequences": 2}, "data": {"streaming": True}}, "set data.streaming=false"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(changes, message, run_values):
    for group, values in changes.items():
        run_values.setdefault(group, {}).update(values)
    with pytest.raises((ValueError, TypeError), match=message):
        train(build_config(RunConfig, run_values))


def test_overfitting_reads_the_same_sequences_again_and_again(run_values):
    run_values["training"] |= {"overfit_sequences": 3, "batch_size": 2}
    config = build_config(RunConfig, run_values)
    data = TextData(config, build_tokenizer(config), total_steps=6)
    data.trainer = SimpleNamespace(global_rank=0, world_size=1, global_step=0, is_global_zero=False)
    data.setup("fit")
    read = [tuple(ids.tolist()) for step in data.train_dataloader() for batch in step for ids in batch["input_ids"]]
    assert len(read) == 12 and len({*read}) == 3 and {*read[:3]} == {*read[3:6]}


@pytest.mark.slow
def test_a_compiled_run_has_the_losses_of_an_eager_one(run_values, tmp_path):
    run_values["training"] |= SHORT
    losses = []
    for compiled in (False, True):
        run_values["trainer"]["compile"] = compiled
        run_values["output_dir"] = str(tmp_path / str(compiled))
        losses.append(logged_losses(train(build_config(RunConfig, run_values)).folder))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
