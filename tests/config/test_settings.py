"""Checked dataclasses: every number of a run is one, and an error of one line names its setting."""

import dataclasses
import os
import typing

import pytest
from composing import changed

from dmc.compression import CompressionConfig
from dmc.config import build_config
from dmc.config.instantiate import instantiate
from dmc.config.settings import OutputFolder, checked_dataclass, suggest
from dmc.data import DocumentSource, StandardLibrarySource
from dmc.training.config import PlannerConfig, RunConfig, StageConfig

SOURCE = {"x": {"_target_": "x"}}
LESSON = {"kind": "facts", "length": 64, "sequences": 4}
RUN = {
    "model": "somewhere",
    "data": {"train": SOURCE, "validation": SOURCE, "facts": {"lessons": [LESSON]}},
    "training": {"stages": {"retrofit": {"length": "5 steps"}}, "batch_size": 1},
    "compression": {},
}


@checked_dataclass(frozen=True)
class Written:
    output: OutputFolder


def numbers_of(config_class, prefix=""):
    """Find every field that holds a number, in the classes inside it too."""
    for name, hint in typing.get_type_hints(config_class).items():
        parts = {hint, *typing.get_args(hint)} | {
            part for inner in typing.get_args(hint) for part in typing.get_args(inner)
        }
        if {int, float} & parts and str not in parts:
            yield prefix + name
        for part in parts:
            if dataclasses.is_dataclass(part) and "LessonConfig" not in part.__name__:
                yield from numbers_of(part, f"{prefix}{name}.{'retrofit.' if part is StageConfig else ''}")


@pytest.mark.parametrize("value", [True, "many", float("nan"), [[]]], ids=repr)
def test_no_setting_of_a_number_takes_anything_else(value):
    paths = sorted(numbers_of(RunConfig))
    assert len(paths) > 50 and "training.stages.retrofit.ramp_to" in paths
    for path in paths:
        with pytest.raises(ValueError) as refused:
            build_config(RunConfig, changed(RUN, {path: value}))
        said = str(refused.value)
        assert path.rpartition(".")[2] in said and "\n" not in said and len(said) < 400, path
    for name in numbers_of(PlannerConfig):
        with pytest.raises(ValueError, match=f"planner.{name}="):
            build_config(PlannerConfig, {name: value}, "planner")


def test_gates_of_a_folder_may_not_be_null_where_a_value_is_due():
    for name in (field.name for field in dataclasses.fields(CompressionConfig) if field.name != "window_size"):
        with pytest.raises(ValueError, match=f"{name}=None"):
            CompressionConfig.from_dict({name: None})
    assert CompressionConfig.from_dict({"window_size": None}).window_size is None
    with pytest.raises(ValueError, match=r"compression=\[1\]: expected a mapping"):
        CompressionConfig.from_dict([1])


def test_an_output_that_is_a_file_or_in_one_is_refused(tmp_path):
    (tmp_path / "notes").touch()
    assert Written(str(tmp_path / "new" / "folder")).output.endswith("folder")
    for path in (tmp_path / "notes", tmp_path / "notes" / "new"):
        with pytest.raises(ValueError, match=f"^output={path}: {tmp_path / 'notes'} is a file; give a folder$"):
            Written(str(path))


def test_an_output_in_a_folder_of_others_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may write anywhere
    with pytest.raises(ValueError, match=f"^output={tmp_path / 'new'}: {tmp_path} cannot be written to$"):
        Written(str(tmp_path / "new"))


def test_a_hint_is_the_closest_name_or_all():
    assert suggest("lenght", ["length", "width"]) == "did you mean 'length'?"
    assert suggest("x", ["length", "width"]) == "expected one of length, width"


def test_objects_inside_settings_are_built_too():
    source = {"_target_": "dmc.data.StandardLibrarySource", "split": "validation"}
    settings = {"_target_": "dmc.results.tasks.TextLoss", "source": source, "num_samples": 2}
    task = instantiate(settings, "tasks.text")
    assert (task.source, task.num_samples) == (StandardLibrarySource("validation"), 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "task has no _target_"),
        ({"_target_": "nowhere.Needle"}, "No module named 'nowhere'"),
        ({"_target_": "dmc.results.tasks.Needl"}, "Are you sure that 'Needl' is importable"),
        ({"_target_": "dmc.results.tasks.Needle", "haystack": "a", "question": "no"}, "question='no': expected"),
        ({"_target_": "dmc.results.tasks.TextLoss", "source": {"_target_": "dmc.data.TextSource", "a": 1}}, "'a'"),
        ({"_target_": "dmc.results.tasks.Needle", "haystack": "a"}, "task is Needle: expected a dmc.data"),
    ],
)  # fmt: skip
def test_settings_of_no_object_are_refused_in_one_line(settings, message):
    with pytest.raises(ValueError) as refused:
        instantiate(settings, "task", DocumentSource)
    assert message in str(refused.value) and "\n" not in str(refused.value)
