"""What analyse.py writes, on the page: the same numbers, and words where there is nothing else."""

from __future__ import annotations

import csv
import json
import shutil
import statistics
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from report_rows import compare_row, write_rows
from transformers import AutoTokenizer

from dmc import load_model
from dmc.analysis.run import AnalyseConfig, plan_analysis, run_analysis
from dmc.config import build_config
from dmc.results.report import read_folders, write_page
from dmc.results.report.verdict import judge
from dmc.training.callbacks.ratio_history import RATIOS_NAME, RatioHistory


@pytest.fixture(scope="module")
def analyse(folders: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what runs an analysis and gives its folder."""
    root = tmp_path_factory.mktemp("analyses")

    def run(name: str, **changes: Any) -> Path:
        source = {"_target_": "dmc.data.TextSource", "name": str(folders.text)}
        sizes = {"num_sequences": 3, "sequence_length": 192, "batch_size": 3, "cache_folder": str(root / "cache")}
        config = build_config(AnalyseConfig, {"source": source, **sizes, "output": str(root / name), **changes})
        load = lambda model: (load_model(model.path), AutoTokenizer.from_pretrained(model.path))  # noqa: E731
        run_analysis(plan_analysis(config), config, load)
        return root / name

    return run


@pytest.fixture(scope="module")
def gates(analyse: Any, folders: Any) -> Path:
    return analyse("gates", model={"path": str(folders.compressed)})


@pytest.fixture(scope="module")
def policy(analyse: Any, folders: Any) -> Path:
    settings = {"_target_": "dmc.policies.StreamingLLM", "sinks": 2}
    return analyse("policy", model={"path": str(folders.stock)}, policy=settings, budget="tokens:32")


def column(path: Path, name: str) -> list[float]:
    with path.open() as file:
        return [float(row[name]) for row in csv.DictReader(file)]


def test_gates_are_told_as_the_files_have_them(gates: Path) -> None:
    (inside,) = read_folders([gates]).insides
    assert inside.name.endswith("/compressed") and inside.text == "3 x 192 tokens"
    ratios = column(gates / "ratio_by_head.csv", "ratio")
    assert [ratio for layer in inside.ratios for ratio in layer] == ratios and len(inside.ratios) == 2
    assert inside.ratio == pytest.approx(statistics.harmonic_mean(ratios))
    length, position = inside.profiles
    assert (length.axis, length.places) == ("tokens", column(gates / "ratio_over_length.csv", "tokens"))
    assert length.of_layers[1] == column(gates / "ratio_over_length.csv", "layer_1")
    merged = column(gates / "decision_over_position.csv", "all")
    assert position.of_all == pytest.approx([statistics.fmean(merged[at : at + 3]) for at in range(0, 192, 3)])
    assert inside.segments is not None
    assert inside.segments.mean == pytest.approx(inside.ratio)
    assert inside.segments.counts == column(gates / "segment_lengths.csv", "all")


def test_what_a_policy_leaves_is_told_as_the_files_have_it(policy: Path) -> None:
    (inside,) = read_folders([policy]).insides
    assert inside.name.endswith("/stock, StreamingLLM at 32 tokens")
    assert {ratio for layer in inside.ratios for ratio in layer} == {192 / 32}
    (survivors,) = inside.profiles
    held = [float(position < 2 or position >= 162) for position in range(192)]
    expected = [statistics.fmean(held[at : at + 3]) for at in range(0, 192, 3)]
    assert survivors.of_all == pytest.approx(expected) and survivors.of_layers[0] == pytest.approx(expected)


def test_a_training_run_is_told_by_its_validations(analyse: Any, tmp_path: Path) -> None:
    history = RatioHistory(tmp_path / "run" / "heatmaps" / RATIOS_NAME)
    history.append(5, torch.tensor([[1.0, 0.5], [0.25, 0.25]]))
    history.append(9, torch.tensor([[0.5, 0.5], [0.25, 0.125]]))
    (inside,) = read_folders([analyse("training", run=str(tmp_path / "run"))]).insides
    assert (inside.name, inside.text, inside.ratios) == ("run", "", [[2.0, 2.0], [4.0, 8.0]])
    (profile,) = inside.profiles
    assert (profile.axis, profile.places, profile.of_all[0]) == ("step", [5.0, 9.0], pytest.approx(2.0))
    assert profile.of_layers == [pytest.approx([1 / 0.75, 2.0]), pytest.approx([4.0, 1 / 0.1875])]


def test_the_page_draws_analyses_alone_and_beside_results(gates: Path, policy: Path, tmp_path: Path) -> None:
    findings = read_folders([gates, policy])
    text = unescape(write_page(findings, tmp_path / "alone").read_text())
    first, second = findings.insides
    assert f"{first.name}: CR {first.ratio:.2f} over 3 x 192 tokens, heads from" in judge(findings).headline
    assert [subject for subject, _ in judge(findings).points] == [second.name]
    for what in ("CR of layers and heads", "compression ratio by tokens", "lengths of segments"):
        assert f"{first.name}" in text and what in text
    assert "share still held by position" in text
    assert len(list((tmp_path / "alone" / "plots").iterdir())) == text.count("<figure>") == 6
    cells = write_rows([compare_row("full"), compare_row("h2o", 2.0)], tmp_path / "cells" / "cells.jsonl")
    verdict = judge(read_folders([cells, gates]))
    assert verdict.headline.startswith("On loss:") and verdict.points[-1][0] == first.name


def test_files_of_an_earlier_analysis_in_the_folder_are_left_out(gates: Path, policy: Path, tmp_path: Path) -> None:
    shutil.copytree(gates, tmp_path / "both")
    shutil.copytree(policy, tmp_path / "both", dirs_exist_ok=True)
    (inside,) = read_folders([tmp_path / "both"]).insides
    assert inside.segments is None and [each.axis for each in inside.profiles] == ["position"]


def test_a_damaged_analysis_is_refused(gates: Path, tmp_path: Path) -> None:
    shutil.copytree(gates, tmp_path / "damaged")
    (tmp_path / "damaged" / "ratio_by_head.csv").write_text("layer,head,ratio\n0,0,many\n")
    with pytest.raises(ValueError, match="damaged: a row is not of this project"):
        read_folders([tmp_path / "damaged"])
    (tmp_path / "damaged" / "analysis.json").write_text(json.dumps({"config": {}}))
    with pytest.raises(ValueError, match="damaged: a row is not of this project"):
        read_folders([tmp_path / "damaged"])
