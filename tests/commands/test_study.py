"""What a study trains, and what it refuses; its table is that of every comparison."""

import json
import shutil
import subprocess

import pytest
from composing import CONFIGS
from scripts_here import run_script

from dmc.commands.collect import read_runs
from dmc.commands.study import StudyConfig, check_measurements, plan_bases, plan_runs, run_study
from dmc.results.store import Store

BOOK = {"_target_": "dmc.data.TextSource", "name": "nowhere.txt"}
SETTINGS = {"bases": {"base": ["a=1"]}, "runs": {"control": ["b=1"], "merge": ["b=2"]}, "policies": ["full"],
            "budgets": [4], "tasks": ["text_loss"], "seeds": [3, 5], "output": "out"}  # fmt: skip


def test_runs_are_planned_seed_by_seed_each_with_its_command():
    config = StudyConfig(**SETTINGS)
    assert [run.arguments for run in plan_bases(config)] == [("a=1", "output_dir=out/base")]
    assert [run.label for run in plan_runs(config)] == ["control-s3", "merge-s3", "control-s5", "merge-s5"]
    assert plan_runs(config)[3].arguments == ("b=2", "output_dir=out/merge-s5", "seed=5")
    further = StudyConfig(**SETTINGS | {"arguments": ["c=3"]})
    assert plan_bases(further)[0].arguments == ("a=1", "c=3", "output_dir=out/base")
    assert plan_runs(further)[0].arguments[-3:] == ("c=3", "output_dir=out/control-s3", "seed=3")
    alone = StudyConfig(**SETTINGS | {"only": ["merge"], "seeds": [3]})
    assert [run.label for run in plan_runs(alone)] == ["control-s3", "merge-s3"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runs": {"merge": []}}, r"has no 'control'"),
        ({"only": ["merg"]}, r"only=\['merg'\]: expected some of control, merge"),
        ({"further": {"merg": ["full"]}}, r"further=\['merg'\]: expected some of control, merge"),
        ({"processes": 0}, "processes=0"),
        ({"seeds": []}, r"seeds=\[\]"),
        ({"seeds": [3, 5, 3]}, r"seeds=\[3, 5, 3\]: give each once"),
        ({"budgets": ["bytes:control"]}, "bytes:control: expected one of the runs merge"),
        ({"budgets": [4, "bytes:merg"]}, "bytes:merg: expected one of the runs merge"),
    ],
)
def test_studies_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        StudyConfig(**SETTINGS | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policies": ["h2o"]}, r"policies=\['h2o'\] lacks 'full'"),
        ({"policies": ["full", "kvpop"]}, "KVpop needs scorer=FILE"),
        ({"policies": ["full", "kvpop+scorer=nowhere"]}, "policies: nowhere does not exist"),
        ({"further": {"merge": ["snapkw"]}}, "further.merge: 'snapkw' is none of the policies; did you mean 'snapkv'"),
        ({"tasks": ["recal"]}, r"tasks\[0\]='recal' is not in configs/task; did you mean 'recall'"),
        ({"tasks": [{"name": "book", "like": "text_loss", "source": BOOK}]}, "nowhere.txt"),
        ({"tasks": ["recall", {"name": "recall", "like": "recall"}]}, "'recall' is given twice"),
    ],
)
def test_what_could_not_be_measured_is_refused_before_anything_is_trained(change, message, tmp_path):
    config = StudyConfig(**SETTINGS | {"policies": ["full", "snapkv"], "output": str(tmp_path / "out")} | change)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_study(config, CONFIGS)
    assert not (tmp_path / "out").exists()


def test_finished_runs_are_checked_too_and_those_that_are_others_are_in_no_table(tmp_path, monkeypatch, capsys):
    started, others, measured = [], [], []

    def start(command, **_):
        folder = next(word.removeprefix("output_dir=") for word in command if word.startswith("output_dir="))
        started.append(folder.rpartition("/")[2])
        return subprocess.CompletedProcess(command, int(started[-1] in others))

    monkeypatch.setattr(subprocess, "run", start)
    evaluate = "dmc.commands.study.evaluate_runs"
    monkeypatch.setattr(evaluate, lambda config, runs, configs: measured.append([run.label for run in runs]))
    config = StudyConfig(**SETTINGS | {"tasks": ["recall"], "output": str(tmp_path)})
    names = ["control-s3", "merge-s3", "control-s5", "merge-s5"]
    for name in ("base", *names):
        export(tmp_path / name / "final", 4.0, 2.0)
    assert run_study(config, CONFIGS) is None and started == ["base", *names] and measured == [names]
    others.append("control-s5")
    assert run_study(config, CONFIGS) == "error: 1 trainings failed" and measured[1] == [*names[:2], names[3]]
    assert f"failed: control-s5 ({tmp_path}/control-s5.log)" in capsys.readouterr().err
    others.append("base")
    assert run_study(config, CONFIGS) == f"error: base failed, see {tmp_path}/base.log" and len(measured) == 2


def test_a_question_may_be_known_and_hidden(tmp_path):
    task = {"name": "asked", "like": "needle", "question": "both"}
    check_measurements(StudyConfig(**SETTINGS | {"tasks": [task], "budgets": ["bytes"]}), CONFIGS)


def export(folder, ratio, loss):
    """Write what an export says of a model at a ratio; the validation text of run `cr8` was used for choices."""
    held = 1.0 if ratio is None else ratio - 0.125
    metrics = {"achieved_ratio": held, "validation_loss_nats_per_token": loss}
    if "cr8" in str(folder):
        metrics = {f"test_{name.removeprefix('validation_')}": value for name, value in metrics.items()}
        metrics |= {"achieved_ratio": 1.0, "validation_loss_nats_per_token": 0.1}
    compression = None if ratio is None else {"target_ratio": ratio}
    folder.mkdir(parents=True)
    (folder / "retrofit.json").write_text(json.dumps({"metrics": metrics, "compression": compression}))


def test_every_exported_model_of_a_sweep_is_in_one_table(tmp_path, capsys):
    sweep, models = tmp_path, {"cr8/final": (8.0, 2.5), "cr8/snapshots/cr3": (3.0, 2.5), "control/final": (None, 2.0)}
    for name, figures in models.items():
        export(sweep / name, *figures)
    for run in ("cr8", "control", "cr4"):  # the last has not finished
        (sweep / run).mkdir(exist_ok=True)
        (sweep / run / "run.json").write_text("{}")
    rows, unfinished = read_runs(sweep)
    assert [row["model"] for row in rows] == ["control/final", "cr8/cr3", "cr8/final"] and unfinished == ["cr4"]
    for _ in range(2):  # the second replaces the first
        assert run_script("collect.py", f"folder={sweep}") == ""
        shown = capsys.readouterr().out
    frame = Store(sweep / "cells.jsonl").frame()
    found = frame[["model", "requested_ratio", "achieved_ratio", "value", "split"]].to_numpy().tolist()
    assert found == [
        ["control/final", 1.0, 1.0, 2.0, "validation"],
        ["cr8/cr3", 3.0, 2.875, 2.5, "test"],
        ["cr8/final", 8.0, 7.875, 2.5, "test"],
    ]
    assert "| cr8/final, learned | CR 8 | 7.88 | 2.5000 |" in shown and "not finished: cr4" in shown
    assert "nan" not in shown and (sweep / "table.md").read_text().strip() in shown
    assert (sweep / "results.csv").is_file()
    shutil.rmtree(sweep / "cr8" / "final")  # to be trained again
    assert run_script("collect.py", f"folder={sweep}") == ""
    shown = capsys.readouterr().out
    assert "cr8/final" not in shown and "| cr8/cr3, learned |" in shown and "not finished: cr4, cr8" in shown


def test_a_folder_without_runs_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no run"):
        read_runs(tmp_path)
