"""The study's own command, on a model and a text small enough for a test."""

import json

import pytest
from scripts_here import run_script

SIZES = "hidden_size=32 intermediate_size=32 num_hidden_layers=1 num_attention_heads=2 num_key_value_heads=2"
TINY = [f"base.shape.{size}" for size in SIZES.split()]


@pytest.mark.slow
def test_a_study_is_trained_measured_and_goes_on(tmp_path, monkeypatch, capsys):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name in ("train", "held_out"):
        lines = [f"{name}: line {number} says {number % 7} and {number % 3}." for number in range(400)]
        (corpus / f"{name}.txt").write_text("\n".join(lines))
    sizes = "sequence_length=64 batch_size=2 micro_batch_size=2 validation_sequences=2 calibration_sequences=2"
    text = ["data=text_files", "trainer=cpu", *(f"training.{size}" for size in sizes.split())]
    text += [f"data.train.text.name={corpus}/train.txt", f"data.validation.text.name={corpus}/held_out.txt"]
    text += [f"data.cache_folder={tmp_path}/cache", f"data.tokenizer.folder={tmp_path}/tokenizer"]
    text += ["data.tokenizer.train_vocab_size=300"]
    study = tmp_path / "study"
    retrofit = [f"model={study}/base/final", "training=short", "compression=dmc_delayed"]
    retrofit += [
        "compression.delay=2",
        "training.stages.zero_out.length=1 steps",
        "training.stages.retrofit.length=2 steps",
    ]
    retrofit += ["training.stages.solidify.length=null"]
    base = ["training=pretrain", "training.stages.pretrain.length=2 steps", "compression=none", *TINY]
    source = {"_target_": "dmc.data.TextSource", "name": f"{corpus}/held_out.txt"}
    task = {"name": "reading", "like": "text_loss", "context_tokens": 1, "scored_tokens": 63, "num_samples": 2}
    task |= {"repeat_ngram": 2, "repeat_distance": 8, "cache_folder": f"{tmp_path}/cache", "source": source}
    settings = {"bases": {"base": base}, "runs": {"control": [*retrofit, "control=true"], "merge": retrofit}}
    settings |= {"tasks": [task], "policies": ["full", "tova"], "budgets": [4], "arguments": text, "seeds": [0]}
    settings |= {"output": str(study), "processes": 2}
    (tmp_path / "study.yaml").write_text(json.dumps(settings))
    settings_file = [f"--config-path={tmp_path}", "--config-name=study"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    error = run_script("study.py", *settings_file)
    assert not error, error + "".join(path.read_text() for path in study.glob("*.log"))[-3000:]
    shown = capsys.readouterr().out
    assert all(f"### reading: {metric} of 2 samples" in shown for metric in ("loss", "long_range_repeat_loss"))
    assert "| control, tova |" in shown and "tova " in shown.split("| merge, learned |")[1]
    assert (study / "compare" / "table.md").read_text().strip() in shown
    assert not run_script("study.py", *settings_file)
    assert capsys.readouterr().out == shown
    settings["runs"]["merge"].append("training.learning_rate=1e-4")
    (tmp_path / "study.yaml").write_text(json.dumps(settings))
    assert run_script("study.py", *settings_file) == "error: 1 trainings failed"
    assert "merge" not in capsys.readouterr().out
    assert "holds a run with other settings (training.learning_rate" in (study / "merge-s0.log").read_text()
    cells = [json.loads(line) for line in (study / "compare" / "cells.jsonl").read_text().splitlines()]
    assert len(cells) == 3
    assert [cell["reference"] for cell in cells if cell["model"] == "merge-s0"] == ["control"]
