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
from dmc.results.plots import draw_analysis
from dmc.results.report import judge, read_folders, write_page
from dmc.training.callbacks.heatmap import RATIOS_NAME, RatioHistory


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


def test_gates_are_told_and_drawn_as_the_files_have_them(gates: Path) -> None:
    (inside,) = read_folders([gates]).analyses
    assert inside["name"].endswith("/compressed") and inside["text"] == "over 3 x 192 tokens"
    ratios = column(gates / "ratio_by_head.csv", "ratio")
    assert inside["ratios"].to_numpy().ravel().tolist() == ratios and len(inside["ratios"]) == 2
    length, position, segments = (
        draw_analysis(kind, inside["tables"][kind], "x").panels[0]
        for kind in ("ratio_over_length", "decision_over_position", "segment_lengths")
    )
    assert list(length.lines[1].get_ydata()) == column(gates / "ratio_over_length.csv", "layer_1")
    merged = column(gates / "decision_over_position.csv", "all")
    expected = [statistics.fmean(merged[at : at + 3]) for at in range(0, 192, 3)]
    assert list(position.lines[-1].get_ydata()) == pytest.approx(expected)
    assert segments.patches[0].get_data().values.tolist() == column(gates / "segment_lengths.csv", "all")  # type: ignore[attr-defined]
    mean = statistics.harmonic_mean(ratios)
    words = dict([judge(read_folders([gates]))["headline"].split(": ", 1)])[inside["name"]]
    assert words.startswith(f"CR {mean:.2f} over 3 x 192 tokens, heads from {min(ratios):.2f} to {max(ratios):.2f}")
    assert f"; {mean:.2f} tokens share an entry on average" in words


def test_what_a_policy_leaves_is_told_as_the_files_have_it(policy: Path) -> None:
    (inside,) = read_folders([policy]).analyses
    assert inside["name"].endswith("/stock, StreamingLLM at 32 tokens")
    assert set(inside["ratios"].to_numpy().ravel()) == {192 / 32}
    mesh: Any = draw_analysis("survivors", inside["tables"]["survivors"], "x").panels[0].collections[0]
    held = [float(position < 2 or position >= 162) for position in range(192)]
    assert mesh.get_array().tolist() == [held, held]


def test_a_training_run_is_told_by_its_validations(analyse: Any, tmp_path: Path) -> None:
    history = RatioHistory(tmp_path / "run" / "heatmaps" / RATIOS_NAME)
    history.append(5, torch.tensor([[1.0, 0.5], [0.25, 0.25]]))
    history.append(9, torch.tensor([[0.5, 0.5], [0.25, 0.125]]))
    (inside,) = read_folders([analyse("training", run=str(tmp_path / "run"))]).analyses
    assert (inside["name"], inside["text"]) == ("run", "at the end of the run")
    assert inside["ratios"].to_numpy().tolist() == [[2.0, 2.0], [4.0, 8.0]]
    lines = draw_analysis("ratio_over_training", inside["tables"]["ratio_over_training"], "x").panels[0].lines
    drawn = [list(line.get_ydata()) for line in lines]
    assert drawn == [
        pytest.approx([1 / 0.75, 2.0]),
        pytest.approx([4.0, 1 / 0.1875]),
        pytest.approx([2.0, 1 / 0.34375]),
    ]
    assert list(lines[0].get_xdata()) == [5.0, 9.0]


def test_the_page_draws_analyses_alone_and_beside_results(gates: Path, policy: Path, tmp_path: Path) -> None:
    findings = read_folders([gates, policy])
    text = unescape(write_page(findings, tmp_path / "alone").read_text())
    assert [subject for subject, _ in judge(findings)["points"]] == [findings.analyses[1]["name"]]
    for what in ("CR of layers and heads", "compression ratio by tokens", "lengths of segments", "share still held by"):
        assert what in text
    assert len(list((tmp_path / "alone" / "plots").iterdir())) == text.count("<figure>") == 6
    cells = write_rows([compare_row("full"), compare_row("h2o", 2.0)], tmp_path / "cells" / "cells.jsonl")
    assert judge(read_folders([cells, gates]))["points"][-1][0] == findings.analyses[0]["name"]


def test_files_of_an_earlier_analysis_in_the_folder_are_left_out(gates: Path, policy: Path, tmp_path: Path) -> None:
    shutil.copytree(gates, tmp_path / "both")
    shutil.copytree(policy, tmp_path / "both", dirs_exist_ok=True)
    (inside,) = read_folders([tmp_path / "both"]).analyses
    assert set(inside["tables"]) == {"survivors", "entries_by_head"}


def test_a_damaged_analysis_is_refused(gates: Path, tmp_path: Path) -> None:
    shutil.copytree(gates, tmp_path / "damaged")
    (tmp_path / "damaged" / "ratio_by_head.csv").write_text("layer,head,ratio\n0,0,many\n")
    with pytest.raises(ValueError, match="damaged: a row is not of this project"):
        read_folders([tmp_path / "damaged"])
    (tmp_path / "damaged" / "analysis.json").write_text(json.dumps({"config": {}}))
    with pytest.raises(ValueError, match="damaged: a row is not of this project"):
        read_folders([tmp_path / "damaged"])
