"""What defines a cell, and rows that differ in any of it stand apart: in the store, in tables, on the page."""

import json
import os
import shutil
import sys
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from report_rows import CONFIGS, NEEDLE, compare_row, lm_eval_row, write_report, write_rows

from dmc.commands.study import StudyConfig, StudyRun, evaluate_runs
from dmc.results.grid import plan_grid
from dmc.results.identity import identity_of
from dmc.results.report import read_folders
from dmc.results.store import Store

KEEP = {"name": "keep", "_target_": "users_keep.Keep"}
MODULE = """
from dataclasses import dataclass
from dmc.policies import LocalWindow

@dataclass(frozen=True, kw_only=True)
class Keep(LocalWindow):
    fails: bool = False
"""


def test_whatever_defines_a_cell_is_in_its_key(keys, folders, tmp_path, monkeypatch):
    model, module, text = tmp_path / "model", tmp_path / "users_keep.py", tmp_path / "text.txt"
    shutil.copytree(folders.stock, model)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_keep", raising=False)
    module.write_text(MODULE)
    text.write_text("one")
    source = {"_target_": "dmc.data.TextSource", "name": str(text)}
    tasks = [NEEDLE, {"name": "text", "like": "text_loss", "source": source}]

    def both(**changes):
        return tuple(
            keys(**{"models": {"m": str(model)}, "policies": [KEEP], "budgets": [2], "tasks": tasks} | changes)
        )

    found = [both()]
    assert both(budgets=["2.0"]) == both(output="elsewhere") == both(policies=[{**KEEP, "fails": False}]) == found[0]
    assert both(tasks=[{**NEEDLE, "seed": 0}, tasks[1]]) == found[0]  # a default written out
    for changes in (
        {"budgets": [4]}, {"policies": [{**KEEP, "fails": True}]}, {"engine": {"block_size": 32}}, {"seed": 1},
        {"models": {"m": {"path": str(model), "dtype": "bfloat16"}}},
        {"models": {"m": {"path": str(model), "revision": "other"}}},
    ):  # fmt: skip
        found.append(both(**changes))
    (model / "README.md").write_text("no part of the model")
    assert both() == found[0] != both(tasks=[{**NEEDLE, "seed": 1}, tasks[1]])
    text.write_text("one and two")
    assert both()[0] == found[0][0] and both()[1] != found[0][1]
    for path in (model / "chat_template.jinja", model / "pytorch_model.bin"):
        path.write_text("new")
        found.append(both())
    os.utime(model / "model.safetensors", ns=(1, 1))
    found.append(both())
    module.write_text(MODULE + "# another version\n")
    found.append(both())
    assert len({key for pair in found for key in pair}) == 2 * len(found)


def test_a_new_option_leaves_what_does_not_use_it_as_it_is():
    def build(options, **values):
        kind = make_dataclass("H2O", options, namespace={"__module__": "dmc.policies.h2o"})
        return identity_of(kind(**values), "budget")

    old = [("budget", int), ("recent", int, 4)]
    new = [*old, ("layers", list, field(default_factory=lambda: [1, 2]))]
    assert build(old, budget=2) == build(new, budget=3) == build(new, budget=2, layers=(1, 2), recent=4)
    assert build(old, budget=2, recent=8) == build(new, budget=2, recent=8) != build(new, budget=2)
    assert build(new, budget=2, layers=[1]) != build(new, budget=2)
    for one, other in ((Path("a"), Path("b")), (SimpleNamespace(size=1), SimpleNamespace(size=2))):  # no dataclasses
        assert build(old, budget=2, recent=one) != build(old, budget=2, recent=other)
        assert identity_of(one) != identity_of(other)
        assert identity_of(one, settings={"size": 1}) != identity_of(one, settings={"size": 2})


def test_a_row_tells_all_options_those_by_default_too(make_config):
    (cell,) = plan_grid(make_config(policies=["h2o"], budgets=[2], tasks=[{**NEEDLE, "seed": 5}]), CONFIGS)
    policy, task = (cell.row["settings"][name] for name in ("policy", "task"))
    for built, told in ((cell.method.build(), policy), (cell.task.task, task)):
        assert {each.name for each in fields(built) if each.init} - {"budget"} <= {*told}
        json.dumps(told)
    assert task["seed"] == 5 and task["_target_"] == NEEDLE.get("_target_", "dmc.results.tasks.Needle")


def test_a_hub_models_commit_is_part_of_its_identity(folders, tmp_path, monkeypatch, keys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--somebody--model"
    (repository / "refs").mkdir(parents=True)

    def key_at(commit):
        (repository / "refs" / "main").write_text(commit * 40)
        snapshot = repository / "snapshots" / (commit * 40)
        snapshot.mkdir(parents=True, exist_ok=True)
        shutil.copy(folders.stock / "config.json", snapshot)
        return keys(models={"base": "somebody/model"})

    assert key_at("a") == key_at("a") != key_at("b")


def lines_of(table):
    return [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize(
    ("kind", "name", "values", "told"),
    [
        ("policy", "recent", [4, 8, 16], "base, h2o (recent={})"),
        ("model", "path", ["one", "two"], "base (path={}), h2o"),
    ],
)
def test_rows_of_one_name_stand_apart_by_the_setting_in_which_they_differ(kind, name, values, told, tmp_path):
    shared, rows = compare_row("h2o", 4.0), []
    for each in values:
        rows.append(shared | {"key": str(each), f"{kind}_key": str(each), "settings": {kind: {name: each}}})
    assert {*lines_of(write_report(rows, tmp_path))} == {told.format(each) for each in values}
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 1 + len(values)
    page = read_folders([write_rows(rows, tmp_path / "cells.jsonl")])
    assert page.summary["label"].nunique() == page.places["label"].nunique() == len(values)


def test_rows_of_two_formats_are_told_apart_by_that_alone(tmp_path):
    rows = []
    for number, options in ((6, {"digits": 5, "chat_template": False}), (7, {"digits": 5})):
        settings = {"policy": {"recent": None}, "task": options, "format": number}
        named = {"policy_key": f"h{number}", "task_key": f"t{number}", "settings": settings}
        rows.append(compare_row("h2o", 4.0) | named | {"key": str(number)})
    table = write_report(rows, tmp_path)
    assert {"base, h2o (format=6)", "base, h2o (format=7)"} <= {*lines_of(table)}
    assert "### loss (format=6): " in table and "### loss (format=7): " in table


def test_selections_of_two_papers_share_tasks_and_both_stand(tmp_path):
    first = [lm_eval_row("full", 1.0, "cs", f"cs_{part}", 0.6) | {"task_key": "cs"} for part in "ab"]
    other = lm_eval_row("full", 1.0, "cs_a", "cs_a", 0.9) | {"members": ["cs_a"], "task_key": "single", "key": "o"}
    table = write_report([*first, other], tmp_path)
    assert "cs (acc) | cs_a (acc)" in table and "left out" not in table
    assert "| 0.6000 ± 0.06" in table and "| 0.9000 ± 0.05" in table
    assert set(read_folders([write_rows([*first, other], tmp_path / "cells.jsonl")]).summary["task"]) == {"cs", "cs_a"}


def test_a_benchmark_with_other_settings_is_another_column(tmp_path):
    rows = []
    for limit in (100, 200):
        for part in "ab":
            row = lm_eval_row("full", 1.0, "cs", f"cs_{part}", limit / 1000)
            rows.append(row | {"task_key": f"t{limit}", "key": f"{limit}{part}", "settings": {"limit": limit}})
    table = write_report(rows, tmp_path)
    assert "cs (limit=100) (acc) | cs (limit=200) (acc)" in table
    assert "| 0.1000 ± " in table and " | 0.2000 ± " in table


def test_the_study_compares_what_its_own_settings_measured(folders, tmp_path):
    shutil.copytree(folders.stock, tmp_path / "control-s0" / "final")
    run = StudyRun("control", 0, tmp_path / "control-s0", ())

    def measured(recent):
        grid = {"policies": ["full", {"name": "h2o", "like": "h2o", "recent": recent}], "budgets": [2]}
        config = StudyConfig(bases={}, runs={"control": []}, tasks=[NEEDLE], output=str(tmp_path / "study"), **grid)
        return evaluate_runs(config, [run], CONFIGS)

    first, other, again = measured(4), measured(8), measured(4)
    assert other != first == again and "control, h2o | CR 2" in other
    assert len(Store(tmp_path / "study" / "compare" / "cells.jsonl").rows()) == 3


def test_a_cell_in_two_folders_is_shown_once_and_one_policy_over_two_models_is_not_one_method(tmp_path):
    twice = [write_rows([compare_row("full")], tmp_path / name / "cells.jsonl") for name in ("one", "two")]
    page = read_folders(twice)
    assert len(page.summary) == 1 and not page.places.duplicated(["by", "position", "layer", "head"]).any()
    folders = []
    for model in ("one", "two"):
        rows = [compare_row("full", model=model, task=model), compare_row("h2o", 4.0, model, model=model)]
        folders.append(write_rows(rows, tmp_path / model / "cells.jsonl"))
    assert set(read_folders(folders).summary["name"]) == {"one full cache", "two full cache", "one h2o", "two h2o"}
