"""Rows that differ in anything stand apart: in the store, in every table, on the page and in the study."""

import csv
import shutil
from dataclasses import field, make_dataclass

from report_rows import CONFIGS, TINY_NEEDLE, compare_row, lm_eval_row, on_command_line, write_report, write_rows
from scripts_here import run_script

from dmc.config import build_config
from dmc.results.grid import CompareConfig, plan_grid
from dmc.results.identity import identity_of
from dmc.results.report import read_folders
from dmc.results.store import Store
from dmc.study import StudyConfig, StudyRun, evaluate_runs

NEEDLE = {"name": "needle", **TINY_NEEDLE}


def h2o(recent):
    return {"name": "h2o", "like": "h2o", "recent": recent}


def settings_of(policy, **task):
    return {"policy": policy, "task": task, "engine": {"block_size": 16}, "seed": 0}


def swept(recent, quality):
    """A row of a sweep over an option of H2O."""
    values = [quality] * 32
    row = compare_row("h2o", 4.0, sample_values=values, metrics={"loss": quality})
    settings = settings_of({"_target_": "dmc.policies.H2O", "recent": recent, "normalise": False})
    return row | {"key": f"h2o-{recent}", "policy_key": f"p{recent}", "settings": settings}


def lines_of(table):
    return [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][1:]


def test_a_sweep_over_an_option_keeps_a_line_for_each_value(tmp_path):
    rows = [compare_row("full"), swept(4, 3.2), swept(8, 3.1), swept(16, 3.3)]
    table = write_report(rows, tmp_path)
    assert lines_of(table) == ["base, full", "base, h2o (recent=8)", "base, h2o (recent=4)", "base, h2o (recent=16)"]
    with (tmp_path / "results.csv").open() as file:
        written = {row["keys"]: row["policy"] for row in csv.DictReader(file)}
    assert {written[f"['h2o-{recent}']"] for recent in (4, 8, 16)} == {f"h2o (recent={n})" for n in (4, 8, 16)}
    page = read_folders([write_rows(rows, tmp_path / "cells.jsonl")])
    assert set(page.summary["label"]) == {"full cache", *(f"h2o (recent={recent}) at CR 4" for recent in (4, 8, 16))}
    assert page.places["label"][page.places["by"] == "position"].nunique() == 4


def test_a_grid_of_a_then_b_then_a_shows_both(folders, tmp_path, capsys):
    def compare(recent):
        command = [f"models={{base: {folders.stock}}}", f"tasks=[{on_command_line(**NEEDLE)}]"]
        command += [f"policies=[{{name: h2o, like: h2o, recent: {recent}}}]", "budgets=2"]
        assert run_script("compare.py", *command, f"output={tmp_path / 'out'}") == ""
        return capsys.readouterr().out

    first, both, again = compare(4), compare(8), compare(4)
    assert "base, h2o |" in first
    assert again == both
    assert sorted(lines_of(again)) == ["base, h2o (recent=4)", "base, h2o (recent=8)"]


def test_options_that_are_defaults_written_out_are_the_same_cell(folders, tmp_path):
    def key_of(policy, task=NEEDLE):
        values = {"models": {"base": str(folders.stock)}, "policies": [policy], "budgets": [2], "tasks": [task]}
        (cell,) = plan_grid(build_config(CompareConfig, {**values, "output": str(tmp_path)}), CONFIGS)
        return cell.key

    plain = {"name": "h2o", "_target_": "dmc.policies.H2O"}
    assert key_of("h2o") == key_of(plain) == key_of({**plain, "recent": None, "evict_decoding": True})
    assert key_of("h2o") != key_of({**plain, "recent": 4})
    assert key_of("h2o") == key_of("h2o", {**NEEDLE, "seed": 0}) != key_of("h2o", {**NEEDLE, "seed": 1})


def test_a_new_option_leaves_what_does_not_use_it_as_it_is():
    def build(options, **values):
        kind = make_dataclass("H2O", options, namespace={"__module__": "dmc.policies.h2o"})
        return identity_of(kind(**values), "budget")

    old = [("budget", int), ("recent", int, 4)]
    new = [*old, ("layers", list, field(default_factory=lambda: [1, 2]))]
    assert build(old, budget=2) == build(new, budget=3) == build(new, budget=2, layers=(1, 2), recent=4)
    assert build(old, budget=2, recent=8) == build(new, budget=2, recent=8) != build(new, budget=2)
    assert build(new, budget=2, layers=[1]) != build(new, budget=2)


def test_whatever_tokenizes_or_weighs_is_part_of_a_models_identity(folders, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folders.stock, copy)

    def key_of(**model):
        values = {"models": {"base": {"path": str(copy), **model}}, "policies": ["full"], "budgets": []}
        (cell,) = plan_grid(build_config(CompareConfig, {**values, "tasks": [NEEDLE]}), CONFIGS)
        return cell.key

    keys = [key_of(), key_of(revision="other")]
    for name in ("chat_template.jinja", "pytorch_model.bin"):
        (copy / name).write_text("new")
        keys.append(key_of())
    assert len(set(keys)) == 4


def test_a_hub_models_commit_is_part_of_its_identity(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--somebody--model"
    (repository / "refs").mkdir(parents=True)

    def key_at(commit):
        (repository / "refs" / "main").write_text(commit * 40)
        snapshot = repository / "snapshots" / (commit * 40)
        snapshot.mkdir(parents=True, exist_ok=True)
        shutil.copy(folders.stock / "config.json", snapshot)
        values = {"models": {"base": "somebody/model"}, "policies": ["full"], "budgets": [], "tasks": [NEEDLE]}
        (cell,) = plan_grid(build_config(CompareConfig, values), CONFIGS)
        return cell.key

    assert key_at("a") == key_at("a") != key_at("b")


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


def test_two_models_of_one_name_stand_apart(tmp_path):
    rows = []
    for path in ("one", "two"):
        for policy, ratio in (("full", 1.0), ("h2o", 4.0)):
            settings = {"model": {"path": path, "dtype": "auto"}, **settings_of({})}
            rows.append(
                compare_row(policy, ratio) | {"key": f"{path}{policy}", "model_key": path, "settings": settings}
            )
    assert sorted(set(lines_of(write_report(rows, tmp_path)))) == [
        f"base (path={path}), {policy}" for path in ("one", "two") for policy in ("full", "h2o")
    ]
    assert read_folders([write_rows(rows, tmp_path / "cells.jsonl")]).summary["label"].nunique() == 4


def test_the_study_compares_what_its_own_settings_measured(folders, tmp_path):
    shutil.copytree(folders.stock, tmp_path / "control-s0" / "final")
    run = StudyRun("control", 0, tmp_path / "control-s0", ())

    def measured(recent):
        config = StudyConfig(
            bases={}, runs={"control": []}, policies=["full", h2o(recent)], budgets=[2], tasks=[NEEDLE],
            output=str(tmp_path / "study"),
        )  # fmt: skip
        return evaluate_runs(config, [run], CONFIGS)

    first, other, again = measured(4), measured(8), measured(4)
    assert other != first == again and "control, h2o | CR 2" in other
    assert len(Store(tmp_path / "study" / "compare" / "cells.jsonl").rows()) == 3


def test_a_cell_in_two_folders_is_shown_once(tmp_path):
    folders = [write_rows([compare_row("full")], tmp_path / name / "cells.jsonl") for name in ("one", "two")]
    page = read_folders(folders)
    assert len(page.summary) == 1 and not page.places.duplicated(["by", "position", "layer", "head"]).any()


def test_one_policy_over_two_models_in_two_folders_is_not_taken_for_one_method(tmp_path):
    folders = []
    for model in ("one", "two"):
        rows = [compare_row("full", model=model, task=model), compare_row("h2o", 4.0, model, model=model)]
        folders.append(write_rows(rows, tmp_path / model / "cells.jsonl"))
    assert set(read_folders(folders).summary["name"]) == {"one full cache", "two full cache", "one h2o", "two h2o"}
