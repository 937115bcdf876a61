import json
import sys

import pytest

import dmc.data
from dmc.config import build_config
from dmc.training.config import RunConfig
from dmc.training.export import export_checkpoint
from dmc.training.record import (
    check_same_run,
    read_config,
    read_foreign_config,
    record_run,
    record_start,
)


def test_every_start_is_a_line_with_its_step_and_job_and_no_token(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JWT", "secret")
    for step in (0, 40):
        record_start(tmp_path, step)
    lines = (tmp_path / "starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 40]
    assert json.loads(lines[1])["slurm"] == {"SLURM_JOB_ID": "17"}
    assert "secret" not in lines[1]
    assert "torch==" in (tmp_path / "packages.txt").read_text()


FOREIGN = (
    "module_of_others.Source",
    "subprocess.Popen",
    "dmc.data.train_tokenizer",
    "dmc.data.text.Path",
    "dmc.data",
    "dmc.training.run",
)


PLACES = ("train", "validation", "calibration", "inside")


@pytest.mark.parametrize(("target", "place"), [*zip(FOREIGN, PLACES + PLACES, strict=False)])
def test_code_that_a_run_names_is_run_only_if_it_is_trusted(target, place, run_values, tmp_path, monkeypatch):
    (tmp_path / "module_of_others.py").write_text("import sys\nsys.executed = True\nclass Source: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    source = {"_target_": target, "name": "book.txt"}
    if place == "inside":
        source = {**run_values["data"]["train"]["text"], "files": source}
    run_values["data"]["train" if place == "inside" else place] = {"x": source}
    record_run(tmp_path / "run", build_config(RunConfig, run_values))
    with pytest.raises(ValueError, match=rf"run.json names {target}, which is no source of dmc.data: .*trust_run=true"):
        read_foreign_config(tmp_path / "run")
    with pytest.raises(ValueError, match="trust_run=true"):
        export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert not hasattr(sys, "executed")
    assert read_foreign_config(tmp_path / "run", trust_run=True).data == build_config(RunConfig, run_values).data


@pytest.mark.parametrize("source", [name for name in dmc.data.__all__ if name.endswith("Source")])
def test_every_source_of_ours_may_be_named(source, run_values, tmp_path):
    run_values["data"]["train"] = {"x": {"_target_": f"dmc.data.{source}", "name": "a book"}}
    record_run(tmp_path, build_config(RunConfig, run_values))
    if source == "DocumentSource":  # what the others are kinds of
        with pytest.raises(ValueError, match="trust_run=true"):
            read_foreign_config(tmp_path)
    else:
        assert [*read_foreign_config(tmp_path).data.train] == ["x"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"control": True}, "target_ratio=8: the run has no gates to calibrate: leave it out"),
        ({"calibrate": False}, "target_ratio=8: calibrate=false leaves the threshold where it is: give one"),
    ],
)
def test_a_ratio_that_no_calibration_would_reach_is_refused(change, message, run_values, tmp_path):
    run_values["control"] = change.pop("control", False)
    record_run(tmp_path / "run", build_config(RunConfig, run_values))
    with pytest.raises(ValueError, match=message):
        export_checkpoint(tmp_path / "run", tmp_path / "out", target_ratio=8.0, overrides=change)


def test_a_run_with_our_own_text_needs_no_trust(run_values, tmp_path):
    run_values["data"]["calibration"] = {"a": {"_target_": "dmc.data.text.TextSource", "name": "a.txt"}}
    run_values["data"]["train"] |= {
        "stdlib": {"_target_": "dmc.data.StandardLibrarySource", "split": "train"},
        "packages": {"_target_": "dmc.data.PackageSource", "packages": ["torch"]},
    }
    record_run(tmp_path, config := build_config(RunConfig, run_values))
    assert read_foreign_config(tmp_path) == config


def test_a_run_has_saved_once_a_checkpoint_is_complete(run_values, tmp_path):
    folder = tmp_path / "run"
    for name in ("checkpoints/step_0000002.partial", "snapshots/.cr2.partial"):
        (folder / name).mkdir(parents=True)
    record_run(folder, build_config(RunConfig, run_values))
    run_values["training"]["learning_rate"] = 5e-4
    other = build_config(RunConfig, run_values)
    check_same_run(folder, other)
    record_run(folder, other)
    assert read_config(folder) == other
    (folder / "checkpoints" / "step_0000002").touch()
    run_values["training"]["learning_rate"] = 1e-4
    with pytest.raises(ValueError, match=r"learning_rate: 0.0005 then, 0.0001 now"):
        check_same_run(folder, build_config(RunConfig, run_values))


def test_a_run_goes_on_where_memory_and_time_limits_are_others(run_values, tmp_path):
    record_run(tmp_path, build_config(RunConfig, run_values))
    (tmp_path / "checkpoints" / "step_0000002").mkdir(parents=True)
    run_values["training"] |= {"activation_checkpointing": True, "checkpoint_every_steps": 7}
    run_values["data"] |= {"cache_folder": "there"}
    check_same_run(tmp_path, build_config(RunConfig, run_values))
    record_run(tmp_path, build_config(RunConfig, run_values))
    assert read_config(tmp_path).data.cache_folder == "there"  # an export finds the text where the run last did
    run_values["model"] = "elsewhere"
    with pytest.raises(ValueError, match=r"model: None then, 'elsewhere' now\): give what it began with, or choose"):
        check_same_run(tmp_path, build_config(RunConfig, run_values))


@pytest.mark.parametrize(("section", "name"), [("training", "stages"), ("data", "train")])
def test_a_run_does_not_go_on_with_its_parts_in_another_order(section, name, run_values, tmp_path):
    run_values["data"]["train"] |= {"more": {"_target_": "dmc.data.StandardLibrarySource", "split": "train"}}
    run_values["compression"] = None
    record_run(tmp_path, build_config(RunConfig, run_values))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step_0000002").touch()
    check_same_run(tmp_path, build_config(RunConfig, run_values))
    run_values[section][name] = dict(reversed(run_values[section][name].items()))
    with pytest.raises(ValueError, match=f"{section}.{name}: .* then, .* now"):
        check_same_run(tmp_path, build_config(RunConfig, run_values))
