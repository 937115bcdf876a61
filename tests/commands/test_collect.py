"""Curves and tables of runs, whatever version of the program they are of."""

import json

import pytest

from dmc.commands.collect import collect
from dmc.results.measurement import new_row
from dmc.results.store import Store
from dmc.results.tables import CSV, write_tables
from dmc.training.model_folder import METRICS_NAME

LOG = "step,train/loss,train/target_ratio,train/achieved_ratio\n1,2.0,1.0,1.0\n2,1.9,2.0,1.8\n3,1.8,4.0,3.5\n"


RECORDS = {
    "another version's": json.dumps({"config": {"compression": {"target_ratio": 4.0, "forgotten": True}, "gone": 1}}),
    "a control's": json.dumps({"config": {"compression": None}}),
    "a name": json.dumps({"config": {"compression": "dmc"}}),
    "a list": json.dumps({"config": [1]}),
    "cut": '{"config": {"comp',
    "empty": "",
}


def test_runs_with_other_records_do_not_stop_the_others(tmp_path):
    known = json.dumps({"config": {"compression": {"target_counts": "held"}}})
    records = {"a": known} | RECORDS | {"z": known}
    for name, record in records.items():
        log = tmp_path / name / "logs" / "version_0"
        log.mkdir(parents=True)
        (log / "metrics.csv").write_text(LOG)
        (tmp_path / name / "run.json").write_text(record)
    assert f"not finished: {', '.join(sorted(records))}" in collect(tmp_path)
    assert all((tmp_path / name / "curves.png").stat().st_size > 10_000 for name in records)


@pytest.mark.parametrize("counts", ["held", "decided"])
def test_curves_show_the_ratio_that_the_target_counts(counts, tmp_path, monkeypatch):
    (tmp_path / "logs" / "version_0").mkdir(parents=True)
    (tmp_path / "logs" / "version_0" / "metrics.csv").write_text(LOG.replace("achieved", "decided"))
    (tmp_path / "run.json").write_text(json.dumps({"config": {"compression": {"target_counts": counts}}}))
    drawn = []
    monkeypatch.setattr("dmc.commands.collect.draw_curves", lambda log, ratio: drawn.append(ratio) or b"")
    collect(tmp_path)
    assert drawn == [{"held": "achieved_ratio", "decided": "decided_ratio"}[counts]]


def test_what_a_comparison_has_put_into_the_tables_of_the_folder_stays(tmp_path):
    settings, store = {"model": {}, "task": {}}, Store(tmp_path / "cells.jsonl")
    figures = {"metrics": {"loss": 1.0}, "main_metric": "loss", "achieved_ratio": 1.0, "higher_is_better": False}
    for policy in ("full", "h2o"):
        store.append(new_row("base", policy, "recall", settings, **figures))
    write_tables(store, tmp_path)
    before = (tmp_path / CSV).read_text().count("recall")
    (tmp_path / "run" / "final").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text("{}")
    metrics = {"validation_loss_nats_per_token": 1.0, "achieved_ratio": 1.0}
    (tmp_path / "run" / "final" / METRICS_NAME).write_text(json.dumps({"metrics": metrics, "compression": None}))
    assert "text of the run" in collect(tmp_path)
    assert (tmp_path / CSV).read_text().count("recall") == before > 0
