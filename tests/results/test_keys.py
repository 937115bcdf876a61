"""What a cell is called, which settings its row keeps, and that rows of one name and other settings never mix."""

import json
import os
import shutil
import sys
from dataclasses import fields

import pytest
from evicting import write_scorer
from report_rows import CONFIGS, NEEDLE, compare_row, lm_eval_row, run_grid, write_report, write_rows

from dmc.commands.study import StudyConfig, StudyRun, evaluate_runs
from dmc.models.loading import load_with_tokenizer
from dmc.results.compare import run_cells
from dmc.results.grid import plan_grid
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


@pytest.fixture
def plan(make_config, folders, tmp_path, monkeypatch):
    """Return a function from changes of a grid with a user's policy and a copy of the models to its cells."""
    for name in ("stock", "compressed"):
        shutil.copytree(getattr(folders, name), tmp_path / name)
    (tmp_path / "users_keep.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_keep", raising=False)
    grid = {"models": {"base": str(tmp_path / "stock"), "small": str(tmp_path / "compressed")}, "tasks": [NEEDLE]}
    grid |= {"policies": ["full", KEEP], "budgets": [2, "bytes:small"]}
    return lambda **changes: plan_grid(make_config(**grid | changes), CONFIGS)


def finish(cells, store):
    """Store a row of every cell without measuring it."""
    figures = {"status": "done", "metrics": {"loss": 1.0}, "achieved_ratio": 1.0, "bytes_allocated_per_token": 1.0}
    for cell in cells:
        store.append({**cell.row, **figures})


def test_a_cell_is_called_by_model_policy_budget_task_and_seed(plan):
    assert [cell.key for cell in plan(seed=1)] == [
        "base/full/needle/seed1", "base/keep/2/needle/seed1", "small/full/needle/seed1",
        "base/keep/bytes:small/needle/seed1",
    ]  # fmt: skip


def test_a_cell_is_called_by_the_options_behind_its_names(plan):
    cell, _ = plan(policies=["h2o+protect=0.1+recent=8"], budgets=[2], tasks=["needle+digits=3"])
    assert cell.key == "base/h2o+protect=0.1+recent=8/2/needle+digits=3/seed0"
    assert (cell.method.build().protect, cell.method.build().recent, cell.task.task.digits) == (0.1, 8, 3)
    with pytest.raises(ValueError, match="unknown setting protet: did you mean 'protect'"):
        plan(policies=["h2o+protet=0.1"])


def load_nothing(model):
    raise AssertionError("a finished cell is not run again")


def test_a_finished_cell_with_other_settings_is_refused_by_the_setting_that_differs(plan, tmp_path):
    store, path = Store(tmp_path / "out" / "cells.jsonl"), str(tmp_path / "stock")
    finish(plan(), store)
    content = store.path.read_bytes()
    (tmp_path / "stock" / "README.md").write_text("no part of the model")
    small = {"small": str(tmp_path / "compressed")}
    for same in (
        {}, {"policies": ["full", {**KEEP, "fails": False}]}, {"tasks": [{**NEEDLE, "seed": 0}]},
        {"engine": {"max_batch_size": 2, "memory": 10**9}}, {"budgets": ["2.0", "bytes:small"]},
        {"models": {"base": {"path": path, "policies": ["full"]}, **small}, "budgets": [2]},
    ):  # fmt: skip
        run_cells(plan(**same), store, load_nothing)
    for changes, reason in (
        ({"policies": ["full", {**KEEP, "fails": True}]}, "base/keep/2/needle/seed0 with policy.fails=false, not true"),
        ({"tasks": [{**NEEDLE, "seed": 3}]}, "base/full/needle/seed0 with task.seed=0, not 3"),
        ({"tasks": [{**NEEDLE, "lengths": [41]}]}, r"task.lengths=\[40\], not \[41\]"),
        ({"engine": {"block_size": 32}}, "engine.block_size=16, not 32"),
        ({"models": {"base": {"path": path, "dtype": "bfloat16"}, **small}}, "model.dtype=auto, not bfloat16"),
    ):
        with pytest.raises(ValueError, match=f"^{store.path} has .*{reason}: give overwrite=true .* another output$"):
            run_cells(plan(**changes), store, load_nothing)
    tokenizer = tmp_path / "stock" / "tokenizer_config.json"
    times = tokenizer.stat()
    os.utime(tokenizer, (1e9, 1e9))  # replaced by an older one
    with pytest.raises(ValueError, match=r"base/full/needle/seed0 with model.version="):
        run_cells(plan(), store, load_nothing)
    os.utime(tokenizer, ns=(times.st_atime_ns, times.st_mtime_ns))
    os.utime(tmp_path / "compressed" / "model.safetensors", (2e9, 2e9))  # trained again
    with pytest.raises(ValueError, match=r"small/full/needle/seed0 with model.version=.*, not 2033-05-18"):
        run_cells(plan(), store, load_nothing)
    last = plan()[-1]
    with pytest.raises(ValueError, match=r"bytes:small/needle/seed0 with budget.bytes_of.version=.*, not 2033"):
        run_cells([last], store, load_nothing)  # the bytes that it was given are another model's
    assert store.path.read_bytes() == content


def test_a_cell_of_a_scorer_is_refused_when_its_file_has_changed(plan, tmp_path):
    store, scorer = Store(tmp_path / "out" / "cells.jsonl"), tmp_path / "scorer"
    policy = {"name": "learned", "like": "kvpop", "scorer": write_scorer(scorer)}
    finish(plan(policies=[policy], budgets=[2]), store)
    write_scorer(scorer)
    run_cells(plan(policies=[policy], budgets=[2]), store, load_nothing)
    write_scorer(scorer, seed=1)
    with pytest.raises(ValueError, match=r"base/learned/2/needle/seed0 with policy.files="):
        run_cells(plan(policies=[policy], budgets=[2]), store, load_nothing)


def test_a_cell_over_a_text_is_refused_when_the_text_has_changed_and_not_when_its_cache_has(plan, folders, tmp_path):
    store, text = Store(tmp_path / "out" / "cells.jsonl"), tmp_path / "text.txt"
    text.write_bytes(folders.text.read_bytes())

    def planned(**options):
        source = {"_target_": "dmc.data.TextSource", "name": str(text)}
        task = {"name": "text", "_target_": "dmc.results.tasks.TextLoss", "source": source, **options}
        facts = {"name": "recall", "like": "recall", "haystack": source}
        return plan(tasks=[task, facts], policies=["full"], budgets=[])

    finish(planned(), store)
    run_cells(planned(cache_folder=str(tmp_path / "cache")), store, load_nothing)
    os.utime(text, (2e9, 2e9))
    run_cells(planned(), store, load_nothing)
    text.write_text(text.read_text().replace("alpha", "gamma"))  # as long as before
    with pytest.raises(ValueError, match=r"base/full/text/seed0 with task.source.content=\w+, not \w+: give overwrite"):
        run_cells(planned(), store, load_nothing)


def test_a_model_that_is_replaced_while_the_grid_runs_is_not_measured_under_its_earlier_name(plan, tmp_path):
    store, cells = Store(tmp_path / "out" / "cells.jsonl"), plan(policies=["full"], budgets=[])
    os.utime(tmp_path / "stock" / "model.safetensors", (2e9, 2e9))
    run_cells(cells, store, lambda model: load_with_tokenizer(model.path))
    replaced, other = store.rows()
    assert replaced["status"] == "failed" and "base: its files have changed since the start" in replaced["error"]
    assert other["status"] == "done"


def test_overwrite_measures_the_cells_of_the_grid_again_and_replaces_their_rows(make_config):
    models = make_config().models
    store = run_grid(make_config(policies=["h2o"], budgets=[2, 4]))
    before = {row["key"]: row for row in store.rows()}
    wide = {"name": "h2o", "like": "h2o", "recent": 8}
    run_grid(make_config(models=models, policies=[wide], budgets=[4], overwrite=True))
    after = {row["key"]: row for row in store.rows()}
    assert after["base/h2o/2/needle/seed0"] == before["base/h2o/2/needle/seed0"]
    assert after["base/h2o/4/needle/seed0"]["settings"]["policy"]["recent"] == 8 and len(after) == 2
    assert {*store.frame()["policy"]} == {"h2o (recent=null)", "h2o (recent=8)"}  # no curve joins them


def test_a_row_keeps_all_options_those_by_default_too(make_config):
    (cell,) = plan_grid(make_config(policies=["h2o"], budgets=[2], tasks=[{**NEEDLE, "seed": 5}]), CONFIGS)
    policy, task = (cell.row["settings"][name] for name in ("policy", "task"))
    for built, settings in ((cell.method.build(), policy), (cell.task.task, task)):
        assert {option.name for option in fields(built) if option.init} - {"budget", "cache_folder"} <= {*settings}
        json.dumps(settings)
    assert task["seed"] == 5 and task["_target_"] == NEEDLE.get("_target_", "dmc.results.tasks.Needle")


def test_models_of_one_variant_and_seed_have_no_common_cell(plan, tmp_path):
    same = {"path": str(tmp_path / "compressed"), "variant": "cr2", "seed": 0}
    base = {"path": str(tmp_path / "stock"), "seed": 0}
    with pytest.raises(ValueError, match="base/keep/bytes:cr2/needle/seed0 is given twice: give each model"):
        plan(models={"base": base, "a": same, "b": same}, budgets=["bytes"])


def test_a_hub_models_commit_is_its_version(folders, tmp_path, monkeypatch, make_config):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--somebody--model"
    (repository / "refs").mkdir(parents=True)
    for commit in ("a" * 40, "b" * 40):
        (repository / "refs" / "main").write_text(commit)
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        shutil.copy(folders.stock / "config.json", snapshot)
        (cell,) = plan_grid(make_config(models={"base": "somebody/model"}), CONFIGS)
        assert cell.row["settings"]["model"]["version"] == commit


def lines_of(table):
    return [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize(
    ("kind", "name", "values", "label"),
    [
        ("policy", "recent", [4, 8, 16], "base, h2o (recent={})"),
        ("model", "path", ["one", "two"], "base (path={}), h2o"),
    ],
)
def test_rows_of_one_name_stand_apart_by_the_setting_in_which_they_differ(kind, name, values, label, tmp_path):
    shared, rows = compare_row("h2o", 4.0), []
    for value in values:
        rows.append(shared | {"key": str(value), "settings": {kind: {name: value}}})
    assert {*lines_of(write_report(rows, tmp_path))} == {label.format(value) for value in values}
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 1 + len(values)
    page = read_folders([write_rows(rows, tmp_path / "cells.jsonl")])
    assert page.summary["label"].nunique() == page.places["label"].nunique() == len(values)


def test_selections_of_two_papers_share_tasks_and_both_stand(tmp_path):
    first = [lm_eval_row("full", 1.0, "cs", f"cs_{part}", 0.6) for part in "ab"]
    other = lm_eval_row("full", 1.0, "cs_a", "cs_a", 0.9) | {"members": ["cs_a"], "key": "o"}
    other["settings"] = {"task": {"name": "cs_a"}}
    table = write_report([*first, other], tmp_path)
    assert "cs (acc) | cs_a (acc)" in table and "left out" not in table
    assert "| 0.6000 ± 0.06" in table and "| 0.9000 ± 0.05" in table
    assert set(read_folders([write_rows([*first, other], tmp_path / "cells.jsonl")]).summary["task"]) == {"cs", "cs_a"}


def test_a_benchmark_with_other_settings_is_another_column(tmp_path):
    rows = []
    for limit in (100, 200):
        for part in "ab":
            row = lm_eval_row("full", 1.0, "cs", f"cs_{part}", limit / 1000)
            rows.append(row | {"key": f"{limit}{part}", "settings": {"lm_eval": {"limit": limit}}})
    table = write_report(rows, tmp_path)
    assert "cs (lm_eval.limit=100) (acc) | cs (lm_eval.limit=200) (acc)" in table
    assert "| 0.1000 ± " in table and " | 0.2000 ± " in table


def test_the_study_measures_again_where_it_is_asked_to(folders, tmp_path):
    shutil.copytree(folders.stock, tmp_path / "control-s0" / "final")
    run = StudyRun("control", 0, tmp_path / "control-s0", ())

    def measured(recent, **changes):
        grid = {"policies": ["full", {"name": "h2o", "like": "h2o", "recent": recent}], "budgets": [2]}
        config = StudyConfig(
            bases={}, runs={"control": []}, tasks=[NEEDLE], output=str(tmp_path / "study"), **grid | changes
        )
        return evaluate_runs(config, [run], CONFIGS)

    first = measured(4)
    with pytest.raises(ValueError, match=r"control-s0/h2o/2/needle/seed0 with policy.recent=4, not 8: give overwrite"):
        measured(8)
    assert measured(8, overwrite=True) != first == measured(4, overwrite=True) and "control, h2o | CR 2" in first
    assert len(Store(tmp_path / "study" / "compare" / "cells.jsonl").rows()) == 2


def test_a_cell_in_two_folders_is_shown_once_and_one_policy_over_two_models_is_not_one_method(tmp_path):
    twice = [write_rows([compare_row("full")], tmp_path / name / "cells.jsonl") for name in ("one", "two")]
    page = read_folders(twice)
    assert len(page.summary) == 1 and not page.places.duplicated(["by", "position", "layer", "head"]).any()
    folders = []
    for model in ("one", "two"):
        rows = [compare_row("full", model=model, task=model), compare_row("h2o", 4.0, model, model=model)]
        folders.append(write_rows(rows, tmp_path / model / "cells.jsonl"))
    assert set(read_folders(folders).summary["name"]) == {"one full cache", "two full cache", "one h2o", "two h2o"}


def test_cells_of_one_key_in_two_folders_are_both_shown_if_their_settings_differ(tmp_path):
    rows = [compare_row("h2o", 4.0, settings={"policy": {"recent": recent}}) for recent in (4, 8)]
    page = read_folders([write_rows([row], tmp_path / str(n) / "cells.jsonl") for n, row in enumerate(rows)])
    assert list(page.summary["method"]) == ["base, h2o (recent=4)", "base, h2o (recent=8)"]
    assert list(page.summary["source"]) == [1, 2]
