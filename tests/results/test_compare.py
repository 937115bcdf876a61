import errno
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from report_rows import CONFIGS, NEEDLE, on_command_line, plain_row, write_report, write_rows
from scripts_here import run_script

from dmc import Engine, load_model
from dmc.models.loading import load_with_tokenizer
from dmc.results.compare import checked, run_cells
from dmc.results.grid import plan_grid
from dmc.results.report import read_folders, write_page
from dmc.results.store import Store

PROVENANCE = {"provenance": {"command": "compare.py", "git_commit": None, "versions": {}}}
ABSENT = {"name": "text", "like": "text_loss", "source": {"_target_": "dmc.data.TextSource", "name": "absent.txt"}}
KEEP = {"name": "keep", "_target_": "users_keep.Keep"}
MODULE = """
from dataclasses import dataclass
from dmc.policies import LocalWindow

@dataclass(frozen=True, kw_only=True)
class Keep(LocalWindow):
    flag: bool = False

    def __post_init__(self):
        if self.budget.tokens == 1:
            raise ValueError("Keep needs 2 entries")

    def fitted(self, num_layers, block_size):
        if self.budget.tokens == 3:
            raise ValueError(f"Keep does not fit {num_layers} layers")
        return self
"""


@pytest.fixture(autouse=True)
def users_module(tmp_path, monkeypatch):
    (tmp_path / "users_keep.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_keep", raising=False)
    return tmp_path / "users_keep.py"


TWO_METHODS = {"policies": ["full", KEEP], "budgets": [2, "tokens:8"]}


class Workshop:
    """Loads models and makes engines that leave policies aside, and counts both; it may be interrupted."""

    def __init__(self, stop_at=None, error=None):
        self.loaded, self.num_engines, self.stop_at, self.error = [], 0, stop_at, error

    def load(self, model):
        self.loaded.append(model.path)
        return load_with_tokenizer(model.path)

    def make_engine(self, model, tokenizer, policy=None, **options):
        if self.num_engines == self.stop_at:
            raise KeyboardInterrupt
        self.num_engines += 1
        if policy is not None and self.error is not None:
            raise self.error
        return Engine(model, tokenizer, **options)


def run(config, workshop):
    store = Store(Path(config.output) / "cells.jsonl")
    run_cells(plan_grid(config, CONFIGS), store, workshop.load, workshop.make_engine)
    return store.rows()


def test_the_full_cache_and_a_compressed_model_have_no_budget(make_config, folders):
    models = {"base": str(folders.stock), "small": {"path": str(folders.compressed), "dtype": "float32"}}
    cells = plan_grid(make_config(models=models, policies=[KEEP, "full"], budgets=TWO_METHODS["budgets"]), CONFIGS)
    titles = ["base keep 2 needle", "base keep tokens:8 needle", "base full needle", "small full needle"]
    assert [cell.title for cell in cells] == titles
    assert [cell.row["learned"] for cell in cells] == [False, False, False, True]
    assert [cell.row["requested_ratio"] for cell in cells] == [2.0, None, 1.0, 2.0]
    assert len({cell.key for cell in cells}) == 4
    assert [cell.row["target_counts"] for cell in cells] == [None, None, None, "held"]
    models["base"] = {"path": str(folders.stock), "policies": ["full"]}  # chooses cells, and changes none
    fewer = plan_grid(make_config(models=models, policies=[KEEP, "full"], budgets=TWO_METHODS["budgets"]), CONFIGS)
    assert [cell.key for cell in fewer] == [cell.key for cell in cells[2:]]


def test_tasks_without_a_seed_have_that_of_the_grid(make_config, folders, tmp_path, monkeypatch):
    fixed = "from dataclasses import dataclass\nfrom dmc.results.tasks import Task\n\n@dataclass\n"
    fixed += "class Fixed(Task):\n    seed, samples, evaluate = 5, None, None\n"
    (tmp_path / "users_fixed.py").write_text(fixed)
    monkeypatch.syspath_prepend(tmp_path)
    tasks = ["needle", {"name": "own", "like": "needle", "seed": 3}, "text_loss"]
    tasks.append({"name": "fixed", "_target_": "users_fixed.Fixed"})
    config = make_config(models={"base": str(folders.stock)}, policies=["full"], budgets=[], tasks=tasks, seed=7)
    found = [cell.row["settings"]["task"].get("seed") for cell in plan_grid(config, CONFIGS)]
    assert found == [7, 3, None, None]


def test_a_row_tells_quality_and_memory(make_config, folders):
    models = {"base": str(folders.stock), "small": str(folders.compressed)}
    rows = run(make_config(models=models, policies=["full", KEEP], budgets=["tokens:8"]), Workshop())
    full, keep, small = rows
    assert [row["status"] for row in rows] == ["done"] * 3
    asked = [(None, 1.0), ("tokens:8", full["mean_tokens"] / 8), (None, 2.0)]
    assert [(row["budget"], row["requested_ratio"]) for row in rows] == asked
    assert (full["achieved_ratio"], full["samples"], len(full["sample_values"])) == (1.0, 2, 2)
    entries = 41 * 2 * 2 * 2 * 16 * 4  # tokens, layers, KV heads, key and value, head_dim, bytes
    assert entries <= full["peak_bytes_allocated"] == pytest.approx(41 * full["bytes_allocated_per_token"])
    assert (full["mean_tokens"], full["mean_achieved_ratio"]) == (40.5, 1.0)  # two tokens behind a prompt of 40
    assert small["achieved_ratio"] > 1.2
    assert (full["main_metric"], full["higher_is_better"]) == ("exact_match", True)
    assert full["metrics"]["exact_match"] == sum(full["sample_values"]) / 2
    asked = {"_target_": "users_keep.Keep", "flag": False, "protect": 0.0, "bounds": None}
    assert keep["settings"]["policy"] == asked
    assert keep["settings"]["task"]["lengths"] == [40]
    assert "versions" in full["provenance"]


def test_an_interrupted_grid_goes_on_with_the_next_cell(make_config, folders):
    config = make_config(models={"base": str(folders.stock), "small": str(folders.compressed)}, **TWO_METHODS)
    with pytest.raises(KeyboardInterrupt):
        run(config, Workshop(stop_at=2))
    before = Store(Path(config.output) / "cells.jsonl").rows()
    second, third = Workshop(), Workshop()
    rows = run(config, second)
    assert (len(before), second.num_engines, rows[:2]) == (2, 2, before)
    assert [row["model"] for row in rows] == ["base", "base", "base", "small"]
    assert run(config, third) == rows and third.loaded == []


ERRORS = [RuntimeError("CUDA error:\n  an illegal address"), MemoryError()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_a_cell_fails_with_the_grid_goes_on_and_the_next_start_tries_it_again(error, make_config):
    config, again = make_config(policies=[KEEP, "full"], budgets=[2]), Workshop()
    failed, full = run(config, Workshop(error=error))
    assert (failed["status"], full["status"]) == ("failed", "done")
    assert "\n" not in failed["error"] and failed["error"].startswith(type(error).__name__)
    assert "in make_engine" in failed["traceback"]
    table = write_report([full, failed], Path(config.output))
    assert table.endswith(f"failed: base, keep, CR 2, needle: {failed['error']}")
    assert {row["status"] for row in run(config, again)} == {"done"} and again.num_engines == 1


def ask_for_more_words(folder):
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"vocab_size": values["vocab_size"] + 1}))


def test_a_model_that_does_not_load_fails_its_cells_and_is_tried_once(make_config, folders, tmp_path):
    shutil.copytree(folders.stock, tmp_path / "bad")
    ask_for_more_words(tmp_path / "bad")
    models, workshop = {"bad": str(tmp_path / "bad"), "good": str(folders.stock)}, Workshop()
    rows = run(make_config(models=models, tasks=[NEEDLE, {**NEEDLE, "name": "n"}]), workshop)
    assert [row["status"] for row in rows] == ["failed"] * 2 + ["done"] * 2
    assert rows[0]["error"] == rows[1]["error"] and workshop.loaded == [*models.values()]


def test_cells_without_figures_end_the_script_with_an_error_beside_the_others_table(
    folders, tmp_path, monkeypatch, capsys
):
    for name in ("broken", "wrong"):
        shutil.copytree(folders.stock, tmp_path / name)
    ask_for_more_words(tmp_path / "broken")
    model = load_model(folders.stock)
    model.model.norm.weight.data.fill_(torch.finfo(torch.float32).max)  # finite, and what follows is not
    model.save_pretrained(tmp_path / "wrong")
    monkeypatch.chdir(tmp_path)
    task = "{name: text, like: text_loss, context_tokens: 8, scored_tokens: 8, num_samples: 2, cache_folder: cache, "
    task += f"source: {{_target_: dmc.data.TextSource, name: {folders.text}}}}}"
    models = f"models={{broken: broken, wrong: wrong, base: {folders.stock}}}"
    for finished in (0, 2):  # what is not finite is finished: it is told again, not measured again
        ended = run_script("compare.py", models, "policies=[full]", f"tasks=[{task}]", "output=out")
        assert ended.startswith("error: 1 of 3 cells failed; ") and "; 1 of 3 cells have metrics that are not" in ended
        output = capsys.readouterr()
        assert f"3 cells, {finished} finished before" in output.err
        assert "not finite, in no table or plot: wrong, full, text: loss is nan" in output.out
        assert "failed: broken, full, text: " in output.out
        assert "| base, full |" in output.out and "| wrong, full |" not in output.out


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("place", "name"), [("os.fsync", "cells.jsonl"), ("pathlib.Path.write_bytes", "table.md")])
def test_a_full_disk_is_told_in_one_line_and_leaves_no_part_of_a_file(place, name, folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [
        f"models={{base: {folders.stock}}}",
        "policies=[full]",
        f"tasks=[{on_command_line(**NEEDLE)}]",
        "output=out",
    ]
    with monkeypatch.context() as context:
        context.setattr(place, full_disk)
        error = run_script("compare.py", *command)
    assert error.startswith("error: [Errno 28] No space left on device") and error.endswith(f"'out/{name}'")
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {"cells.jsonl", ".cells.jsonl.lock", ".locks"}
    assert run_script("compare.py", *command) == "" and (tmp_path / "out" / "table.md").is_file()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_figures_that_are_no_numbers_are_told_and_in_no_statistic(value, tmp_path):
    values = {"h2o": [1.0, 2.0], "bad": [1.0, value]}
    rows = [checked(plain_row(name, "4", value, **PROVENANCE)) for name, value in values.items()]
    assert [row["status"] for row in rows] == ["done", "not finite"]
    findings = read_folders([write_rows(rows, tmp_path / "cells.jsonl")])
    assert findings.problems == [f"not finite, in no table or plot: base, bad, CR 4, text: loss is {value}"]
    assert list(findings.summary["name"]) == ["h2o"]
    write_page(findings, tmp_path / "page")
    with pytest.raises(TypeError, match="not JSON serializable"):
        checked(rows[0] | {"sample_values": [torch.ones(1)]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": {}}, "models={}: expected at least 1 item"),
        ({"tasks": [ABSENT]}, "absent"),
        ({"policies": [KEEP, KEEP]}, r"policies\[1\]: 'keep' is given twice"),
        ({"policies": [{**KEEP, "flga": 1}]}, "unexpected keyword argument 'flga'"),
        ({"budgets": [2, "tokens:1"]}, r"Keep needs 2 entries"),
        ({"budgets": [2, "tokens:3"]}, r"keep on base: Keep does not fit 2 layers"),
    ],
)
def test_wrong_settings_end_it_before_any_work(changes, message, make_config):
    with pytest.raises(
        (ValueError, FileNotFoundError), match=message
    ):  # more of them: tests/config/test_bad_command_lines.py
        plan_grid(make_config(**{"policies": [KEEP], "budgets": [2], **changes}), CONFIGS)


def test_jobs_of_a_sweep_share_a_folder(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    models = f"models={{base: {folders.stock}, small: {folders.compressed}}}"
    task = f"tasks=[{on_command_line(**NEEDLE)}]"
    assert run_script("compare.py", "-m", "policies=[],[full]", task, models, "output=out") == ""
    said, table = capsys.readouterr(), (tmp_path / "out" / "table.md").read_text()
    rows = Store(tmp_path / "out" / "cells.jsonl").rows()
    assert [(row["model"], row["status"]) for row in rows] == [("small", "done"), ("base", "done")]
    assert "2 cells, 1 finished before" in said.err
    assert table.strip() in said.out and "| small, learned | CR 2 |" in table


def test_what_is_reported_is_measured_on_text_that_nothing_is_chosen_on(make_config, tmp_path):
    names = sorted(path.stem for path in (CONFIGS / "task").glob("*.yaml"))
    source = {"_target_": "dmc.data.TextSource", "name": str(CONFIGS / "compare.yaml")}
    held_out = {"_target_": "dmc.data.StandardLibrarySource", "split": "validation"}
    tasks = [*names, {"name": "own", "like": "text_loss", "source": source}]
    tasks += [{"name": "chosen", "like": "text_loss", "source": held_out}]
    rows = {cell.task.name: cell.row for cell in plan_grid(make_config(tasks=tasks), CONFIGS)}
    without_text = dict.fromkeys(["passkey", "key_value", "two_stage", "two_stage_direct", "own"])
    without_text |= dict.fromkeys(["ruler_niah", "ruler_vt", "ruler_cwe", "ruler_fwe"])
    splits = dict.fromkeys(names, "test") | without_text | {"chosen": "validation"}
    assert {name: row["split"] for name, row in rows.items()} == splits
    assert {row["main_metric"] for row in rows.values()} == {
        *("loss", "exact_match", "obeyed", "share_held", "agreement", "string_match")
    }
    assert [rows[name]["question"] for name in ("passkey", "multi_turn", "text_loss")] == ["known", "hidden", None]
    for changes, title in ({"split": "validation"}, " of the validation split"), ({"question": "hidden"}, ""):
        table = write_report([plain_row("full", None, [1.0, 2.0], **changes)], tmp_path)
        assert (
            table.startswith(f"### text: loss of 2 samples{title} (lower is better)") and changes.popitem()[1] in table
        )
