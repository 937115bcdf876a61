import json
import runpy
import shlex
from pathlib import Path

import pytest
import torch
from documents import commands, examples
from hydra import compose, initialize_config_dir
from scripts_here import run_script

from dmc import load_model
from dmc.config import run_config
from dmc.loading import load_tokenizer
from dmc.results.statistics import summarize
from dmc.results.store import Store
from dmc.training.text_data import TextData

ROOT = Path(__file__).parent.parent
TINY = """
training.stages={zero_out: {steps: 2}, retrofit: {steps: 4}, solidify: {steps: 2}}
training.sequence_length=64
training.batch_size=2
training.micro_batch_size=2
training.validation_sequences=8
training.calibration_sequences=4
training.checkpoint_every_steps=1
training.log_every_steps=1
""".strip().splitlines()
RETROFIT = [*TINY, "compression.delay=8", "training.measured_start.sequences=2"]


def retrofit_config(overrides):
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return run_config(compose("train", overrides=["experiment=quickstart_retrofit", *overrides]))


@pytest.mark.slow
def test_main_job_runs_small_and_a_second_run_reuses_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.syspath_prepend(tmp_path)
    base = ["training.stages.pretrain.steps=3", *TINY[1:]]
    assert not run_script("train.py", "experiment=quickstart_base", *base)
    assert not run_script("quickstart.py", "--base", *base, "--retrofit", *RETROFIT)
    shown = capsys.readouterr().out
    folder = tmp_path / "outputs/quickstart"
    frame = Store(folder / "cells.jsonl").frame()
    lines = summarize(frame).set_index("title")
    methods = ["control, full", *(f"control, {name}, CR {ratio}" for name in ("h2o", "tova") for ratio in (2, 4, 8))]
    models = ["base, full", "snapshot CR 2, own gates, CR 2", "snapshot CR 3, own gates, CR 3"]
    assert set(lines.index) == {*methods, *models, "retrofit, own gates, CR 4"}
    control, final = lines.loc["control, full"], lines.loc["retrofit, own gates, CR 4"]
    assert control["achieved_ratio"] == 1 and 0 < final["bytes_per_token"] < control["bytes_per_token"]
    assert (final["split"], final["samples"], final["lost"] > -1) == ("test", 8, True)
    data = TextData(retrofit_config(RETROFIT), load_tokenizer(folder / "base/final"), total_steps=1)
    texts = torch.cat([batch["input_ids"] for batch in data.held_out("test")])
    with torch.no_grad():
        logits = load_model(folder / "control/final")(texts).logits[:, :-1].transpose(1, 2)
    naive = torch.nn.functional.cross_entropy(logits, texts[:, 1:])
    assert control["value"] == pytest.approx(float(naive), abs=1e-5)  # the sequences that the runs report on
    assert "| retrofit, own gates | CR 4 |" in shown and "| control, tova | CR 8 |" in shown
    assert (folder / "table.md").read_text().strip() in shown and "outputs/quickstart/report/report.html" in shown
    assert "snapshot CR 2 (own gates)" in (folder / "report/report.html").read_text()
    assert set(json.loads((folder / "seconds.json").read_text())) == {"base", "control", "retrofit", "measure"}
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("model.safetensors")}
    assert not run_script("quickstart.py", "--base", *base, "--retrofit", *RETROFIT)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("model.safetensors")} == stamps

    files = [file for file, _ in examples()]
    for file, code in examples():
        (tmp_path / file).write_text(code)
        runpy.run_path(file, run_name="__main__")
    extensions = {Path(file).stem for file in files if not file.startswith("example_")}
    assert {"key_norm", "first_token", "numbers_source"} <= extensions
    for words in map(shlex.split, commands()):
        if (
            any(f"{name}." in word for name in extensions for word in words)
            or "output_dir=outputs/local_prior" in words
        ):
            assert not run_script(Path(words[1]).name, *words[2:])
    assert "key_norm" in (tmp_path / "outputs/compare/table.md").read_text()

    capsys.readouterr()
    model = "model=outputs/quickstart/retrofit/final"
    assert not run_script("generate.py", model, "prompt=import os", "max_new_tokens=8")
    assert capsys.readouterr().out.startswith("import os")
    assert not run_script("export.py", "run=outputs/quickstart/retrofit", "output=exported")
    assert "is not empty" in run_script("export.py", "run=outputs/quickstart/retrofit", "output=exported")
