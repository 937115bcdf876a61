from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts_here import run_script
from transformers import AutoTokenizer

from dmc import load_model
from dmc.analysis.run import AnalyseConfig, plan_analysis, run_analysis
from dmc.config import build_config
from dmc.training.callbacks.heatmap import RATIOS_NAME, RatioHistory

ROOT = Path(__file__).resolve().parents[2]
PAIRS = {
    "gates": ["ratio_by_head", "ratio_over_length", "decision_over_position", "segment_lengths"],
    "policy": ["survivors", "entries_by_head"],
}


def settings(folders: Any, tmp_path: Path, **changes: Any) -> AnalyseConfig:
    values = {
        "source": {"_target_": "dmc.data.TextSource", "name": str(folders.text)},
        "num_sequences": 3,
        "sequence_length": 48,
        "batch_size": 2,
        "cache_folder": str(tmp_path / "cache"),
        "output": str(tmp_path / "out"),
        **changes,
    }
    return build_config(AnalyseConfig, values)


def load(model: Any) -> tuple[Any, Any]:
    return load_model(model.path), AutoTokenizer.from_pretrained(model.path)


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_gates_are_drawn_with_their_numbers_beside_them(folders: Any, tmp_path: Path) -> None:
    config = settings(folders, tmp_path, model={"path": str(folders.compressed)})
    paths = run_analysis(plan_analysis(config), config, load)
    out = tmp_path / "out"
    expected = {f"{name}.{suffix}" for name in PAIRS["gates"] for suffix in ("png", "csv")}
    assert {path.name for path in paths} == expected | {"segmentation.html", "segmentation.json", "analysis.json"}
    assert all(path.stat().st_size > 0 for path in paths)
    heads = [float(row["ratio"]) for row in read(out / "ratio_by_head.csv")]
    (*_, last) = read(out / "ratio_over_length.csv")
    assert int(last["tokens"]) == 48 and len(heads) == 4
    assert float(last["all"]) == pytest.approx(4 / sum(1 / ratio for ratio in heads))
    segments = read(out / "segment_lengths.csv")
    assert sum(int(row["tokens"]) * int(row["all"]) for row in segments) == 48 * 3 * 4
    assert sum(int(row["all"]) for row in segments) == pytest.approx(48 * 3 * sum(1 / ratio for ratio in heads))
    assert [row["position"] for row in read(out / "decision_over_position.csv")] == [str(i) for i in range(48)]
    assert json.loads((out / "segmentation.json").read_text())["segments"][0]["begin"] == 0
    assert "versions" in json.loads((out / "analysis.json").read_text())["provenance"]


def test_survivors_are_drawn_with_their_numbers_beside_them(folders: Any, tmp_path: Path) -> None:
    policy = {"_target_": "dmc.policies.StreamingLLM", "sinks": 2}
    config = settings(folders, tmp_path, model={"path": str(folders.stock)}, policy=policy, budget="tokens:10")
    run_analysis(plan_analysis(config), config, load)
    out = tmp_path / "out"
    rows = read(out / "survivors.csv")
    for head in ("head_0", "head_1"):
        assert {int(row["position"]) for row in rows if float(row[head]) == 1} == {0, 1, *range(40, 48)}
        assert {float(row[head]) for row in rows} == {0, 1} and len(rows) == 2 * 48
    assert {row["entries"] for row in read(out / "entries_by_head.csv")} == {"10.0"}


def test_a_run_alone_is_enough_for_the_ratios_along_it(folders: Any, tmp_path: Path) -> None:
    history = RatioHistory(tmp_path / "run" / "heatmaps" / RATIOS_NAME)
    for step in (2, 4):
        history.append(step, torch.full((2, 3), 1 / step))
    config = settings(folders, tmp_path, run=str(tmp_path / "run"))
    names = [path.name for path in run_analysis(plan_analysis(config), config, load)]
    assert names == ["ratio_over_training.png", "ratio_over_training.csv", "analysis.json"]
    rows = read(tmp_path / "out" / "ratio_over_training.csv")
    assert [(row["step"], float(row["ratio"])) for row in rows] == [("2", 2.0)] * 6 + [("4", 4.0)] * 6


@pytest.mark.parametrize("content", ["", "{}\n", '{"step": 2, "held": [[1'])
def test_a_damaged_history_is_told_before_anything_is_written(content: str, folders: Any, tmp_path: Path) -> None:
    path = tmp_path / "run" / "heatmaps" / RATIOS_NAME
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(ValueError, match=r"ratios\.jsonl is damaged or empty"):
        plan_analysis(settings(folders, tmp_path, run=str(tmp_path / "run")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "nothing to analyse"),
        ({"model": "absent"}, "there is no folder"),
        ({"model": "stock"}, "stock model, which keeps everything: give policy=h2o budget=4"),
        ({"model": "compressed", "policy": "H2O", "budget": 4}, "has gates of its own"),
        ({"model": "stock", "policy": "H2O"}, "needs a budget"),
        ({"model": "stock", "policy": "Quest", "budget": 2}, "Quest holds every token and only reads fewer"),
        ({"model": "compressed", "segmentation": {"layer": 2}}, "segmentation.layer=2: the model has layers 0 to 1"),
        ({"model": "compressed", "segmentation": {"head": -1}}, "segmentation.head=-1: the model has heads 0 to 1"),
        ({"model": "compressed", "segmentation": {"tokens": 0}}, "segmentation.tokens=0"),
        ({"model": "compressed", "source": {}}, "source has no _target_"),
        ({"model": "compressed", "num_sequences": 0}, "num_sequences=0: expected a whole number >= 1"),
        ({"run": "absent"}, "ratios.jsonl does not exist: run= is the output folder"),
    ],
)
def test_what_cannot_be_analysed_is_refused_before_anything_is_written(
    changes: dict[str, Any], message: str, folders: Any, tmp_path: Path
) -> None:
    if "model" in changes:
        changes = {**changes, "model": {"path": str(tmp_path / changes["model"])}}
    if "policy" in changes:
        changes = {**changes, "policy": {"_target_": f"dmc.policies.{changes['policy']}"}}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        plan_analysis(settings(folders, tmp_path, **changes))
    assert not (tmp_path / "out").exists() and not (tmp_path / "cache").exists()


def test_the_script_draws_what_a_policy_leaves(
    folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = f"++source={{_target_: dmc.data.TextSource, name: {folders.text}}}"
    sizes = ["sequence_length=32", "num_sequences=2"]
    model = f"model={folders.stock}"
    assert run_script("analyse.py", model, source, "~source.split", *sizes, "policy=tova", "budget=4") == ""
    assert "survivors.png" in capsys.readouterr().out
    assert (tmp_path / "outputs" / "analysis" / "survivors.png").exists()
