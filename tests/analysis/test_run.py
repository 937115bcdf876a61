from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts_here import run_script
from transformers import AutoTokenizer

from dmc import load_model
from dmc.analysis.decisions import collect_decisions
from dmc.analysis.run import AnalyseConfig, plan_analysis, run_analysis
from dmc.config import build_config
from dmc.data import TextSource, build_packed
from dmc.results.plots import draw_places
from dmc.results.report import read_folders, write_page
from dmc.training.callbacks.heatmap import RATIOS_NAME, RatioHistory

ROOT = Path(__file__).resolve().parents[2]


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


def analyse(config: AnalyseConfig) -> tuple[list[Path], Any]:
    """Run an analysis; its files, and what the page reads of them."""
    paths = run_analysis(plan_analysis(config), config, load)
    return paths, read_folders([Path(config.output)]).places


def test_gates_are_stored_and_drawn_as_they_decide(folders: Any, tmp_path: Path) -> None:
    config = settings(folders, tmp_path, model={"path": str(folders.compressed)})
    paths, places = analyse(config)
    assert all(path.stat().st_size > 0 for path in paths)
    assert {path.name for path in paths if path.suffix != ".png"} == {
        *("cells.jsonl", "measurements.csv", "segmentation.html", "segmentation.json")
    }
    model, tokenizer = load(config.model)
    windows: Any = build_packed(TextSource(str(folders.text)), tokenizer, 48, config.cache_folder)
    decisions = collect_decisions(model, [torch.stack([windows[index]["input_ids"] for index in range(3)])])
    expected = {
        "layer head": decisions.ratio_by_head(),
        "tokens layer": decisions.ratio_over_length(range(1, 49)),
        "position layer": decisions.decision_over_position().T,
        "segment_length layer": decisions.segment_lengths()[:, 1:].T.float(),
    }
    for by, values in expected.items():
        found = torch.tensor(places[places["by"] == by]["value"].to_numpy(), dtype=torch.float32)
        torch.testing.assert_close(found, values.flatten())
    drawn = {by: draw_places(own)[0].panels[0] for by, own in places.groupby("by")}
    heads = expected["layer head"]
    assert drawn["layer head"].collections[0].get_array().flatten().tolist() == pytest.approx(heads.flatten().tolist())
    *layers, of_all = (line.get_ydata() for line in drawn["tokens layer"].lines)
    assert list(layers[1]) == pytest.approx(expected["tokens layer"][:, 1].tolist())
    assert of_all[-1] == pytest.approx(float(1 / (1 / heads).mean()))  # tokens over entries, of all heads together
    with (tmp_path / "out" / "measurements.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["by"] == "position layer"]
    assert [int(float(row["position"])) for row in rows[::2]] == list(range(48))
    text = write_page(read_folders([tmp_path / "out"]), tmp_path / "page").read_text()
    assert text.count("<figure>") == len(paths) - 4 == 4 and "1 analysis" in text and "No methods are compared" in text


def test_survivors_are_stored_and_drawn_and_several_analyses_share_a_folder(folders: Any, tmp_path: Path) -> None:
    policy = {"_target_": "dmc.policies.StreamingLLM", "sinks": 2}
    config = settings(folders, tmp_path, model={"path": str(folders.stock)}, policy=policy, budget="tokens:10")
    _, places = analyse(config)
    held = places[places["metric"] == "share_held"]
    kept = set(held["position"][held["value"] == 1])
    assert kept == {0, 1, *range(40, 48)} and set(held["value"]) == {0, 1} and len(held) == 2 * 48
    assert set(places[places["metric"] == "entries"]["value"]) == {10}
    assert set(places["label"]) == {"StreamingLLM at 10 tokens"} and places["achieved_ratio"].iloc[0] == pytest.approx(
        4.8
    )
    history = RatioHistory(tmp_path / "run" / "heatmaps" / RATIOS_NAME)
    for step in (2, 4):
        history.append(step, torch.tensor([[1 / step, 1 / step], [1.0, 1 / step]]))
    _, places = analyse(settings(folders, tmp_path, run=str(tmp_path / "run")))
    along = places[(places["by"] == "step layer")]
    assert along[["step", "layer"]].to_numpy().tolist() == [[2, 0], [2, 1], [4, 0], [4, 1]]
    assert along["value"].tolist() == pytest.approx([2, 1 / 0.75, 4, 1 / 0.625])
    (plot,) = draw_places(along)
    assert list(plot.panels[0].lines[-1].get_ydata()) == pytest.approx([1 / 0.625, 1 / 0.4375])
    assert places["key"].nunique() == 2  # both are on one page


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
    shown = [Path(line) for line in capsys.readouterr().out.split()]
    assert any("share-held" in path.name for path in shown) and all(path.is_file() for path in shown)
