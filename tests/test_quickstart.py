import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch
from scripts_here import run_script

from dmc import Engine, retrofit
from dmc.budget import Budget
from dmc.compression import CompressionConfig
from dmc.policies import H2O
from dmc.quickstart import Row, _read, format_table

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


def test_table_shows_the_distance_to_the_control():
    table = format_table(
        [
            Row("base", 3.0, 1.0, 4096.0, 1.0, 0.02),
            Row("control", 2.5, 1.0, 4096.0, 1.0),
            Row("final", 2.6, 2.5, 1500, 4.02, 0.0104),
        ],
        "validation",
    )
    assert "loss (nats/token, validation split)" in table
    assert table.splitlines()[2:] == [
        "| base | 3.000 | +0.500 ± 0.020 | 1.00 | 1.00 | 4,096 |",
        "| control | 2.500 | +0.000 | 1.00 | 1.00 | 4,096 |",
        "| final | 2.600 | +0.100 ± 0.010 | 4.02 | 2.50 | 1,500 |",
    ]


def test_all_read_the_same_text_and_memory_counts_over_all_of_it(make_stock):
    model, texts = make_stock(), torch.randint(0, 83, (3, 60), generator=torch.Generator().manual_seed(0))
    full = _read(Engine(model), texts, "control")
    with torch.no_grad():
        logits = model(texts).logits[:, :-1].transpose(1, 2)
    naive = torch.nn.functional.cross_entropy(logits, texts[:, 1:], reduction="none").mean(1)
    torch.testing.assert_close(full.losses, naive.double(), rtol=0, atol=1e-5)
    assert (full.achieved_ratio, full.final_ratio) == (1.0, 1.0)
    gates = CompressionConfig(action="drop", delay=16, decision_offset=-1e6, target_ratio=4.0)  # all but the first
    delayed = _read(Engine(retrofit(make_stock(), gates)), texts, "final")
    held = [min(seen, 16) + (seen > 16) for seen in range(1, 60)]
    assert delayed.achieved_ratio == pytest.approx(sum(range(1, 60)) / sum(held))  # 2.02
    assert delayed.final_ratio == pytest.approx(59 / 17)  # the target is one of this kind
    evicted = _read(Engine(model, policy=H2O(budget=Budget(ratio=delayed.achieved_ratio))), texts, "control, h2o")
    assert evicted.achieved_ratio == pytest.approx(delayed.achieved_ratio, rel=0.05)
    error = (evicted.losses - full.losses).std() / 3**0.5
    assert evicted.row("h2o", full.losses).over_control_error == pytest.approx(float(error))
    assert full.row("control", full.losses).over_control_error is None


@pytest.mark.slow
def test_main_job_runs_small_and_a_second_run_reuses_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.syspath_prepend(tmp_path)
    base = ["training.stages.pretrain.steps=3", *TINY[1:]]
    assert not run_script("train.py", "experiment=quickstart_base", *base)
    assert not run_script("quickstart.py", "--base", *base, "--retrofit", *RETROFIT)
    shown = capsys.readouterr().out
    results = json.loads((tmp_path / "outputs/quickstart/results.json").read_text())
    assert set(results) >= {"base", "control", "final", "snapshots", "seconds", "command", "versions"}
    assert set(results["training_free"]) == {"h2o", "tova"}
    measured = (*results["snapshots"].values(), *results["training_free"].values())
    for row in (results["base"], results["control"], results["final"], *measured):
        assert set(row) == {"loss", "achieved_ratio", "bytes_per_token", "final_ratio", "over_control_error"}
    assert results["base"]["achieved_ratio"] == results["control"]["achieved_ratio"] == 1
    assert set(results["snapshots"]) == {"2", "3"}
    assert "| final |" in shown
    assert all(0 < abs(row["loss"] - results["control"]["loss"]) < 1 for row in results["training_free"].values())
    held = results["final"]["bytes_per_token"]  # the control under a policy holds as much, but for whole pages
    assert all(0.8 < row["bytes_per_token"] / held < 1.25 for row in results["training_free"].values())
    assert results["split"] == "test"
    assert "test_loss_nats_per_token" in (tmp_path / "outputs/quickstart/retrofit/final/retrofit.json").read_text()
    assert "outputs/quickstart/report/report.html" in shown
    assert "retrofit" in (tmp_path / "outputs/quickstart/report/report.html").read_text()
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("model.safetensors")}
    assert not run_script("quickstart.py", "--base", *base, "--retrofit", *RETROFIT)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("model.safetensors")} == stamps

    readme = (ROOT / "README.md").read_text()
    for number, example in enumerate(re.findall(r"```python\n(.*?)```", readme, flags=re.S)):
        file = tmp_path / ("key_norm.py" if "class KeyNorm" in example else f"example_{number}.py")
        file.write_text(example)
        runpy.run_path(file.name, run_name="__main__")

    (own,) = [line for line in re.findall(r"`python scripts/([^`]+)`", readme) if "key_norm.KeyNorm" in line]
    assert not run_script(*shlex.split(own), "tasks.0.num_samples=1")
    assert "key_norm" in (tmp_path / "outputs/compare/table.md").read_text()

    capsys.readouterr()
    model = "model=outputs/quickstart/retrofit/final"
    assert not run_script("generate.py", model, "prompt=import os", "max_new_tokens=8")
    assert capsys.readouterr().out.startswith("import os")
    assert not run_script("export.py", "run=outputs/quickstart/retrofit", "output=exported")
    assert "is not empty" in run_script("export.py", "run=outputs/quickstart/retrofit", "output=exported")
