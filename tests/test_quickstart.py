import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
from scripts_here import run_script

from dmc.quickstart import Row, format_table

ROOT = Path(__file__).parent.parent
TINY = """
training.stages=[{name: zero_out, steps: 2}, {name: retrofit, steps: 4}, {name: solidify, steps: 2}]
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
        [Row("base", 3.0, 1.0, 4096.0), Row("control", 2.5, 1.0, 4096.0), Row("final", 2.6, 4.02, 1500)]
    )
    assert table.splitlines()[2:] == [
        "| base | 3.000 | +0.500 | 1.00 | 4,096 |",
        "| control | 2.500 | +0.000 | 1.00 | 4,096 |",
        "| final | 2.600 | +0.100 | 4.02 | 1,500 |",
    ]


@pytest.mark.slow
def test_main_job_runs_small_and_a_second_run_reuses_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.syspath_prepend(tmp_path)
    base = [line.replace("name: zero_out", "name: pretrain") for line in TINY]
    base[0] = "training.stages=[{name: pretrain, steps: 3}]"
    assert not run_script("train.py", "experiment=quickstart_base", *base)
    assert not run_script("quickstart.py", "--base", *base, "--retrofit", *RETROFIT)
    shown = capsys.readouterr().out
    results = json.loads((tmp_path / "outputs/quickstart/results.json").read_text())
    assert set(results) >= {"base", "control", "final", "snapshots", "seconds", "command", "versions"}
    assert set(results["training_free"]) == {"h2o", "tova"}
    measured = (*results["snapshots"].values(), *results["training_free"].values())
    for row in (results["base"], results["control"], results["final"], *measured):
        assert set(row) == {"loss", "achieved_ratio", "bytes_per_token"}
    assert results["base"]["achieved_ratio"] == results["control"]["achieved_ratio"] == 1
    assert set(results["snapshots"]) == {"2", "3"}
    assert "| final |" in shown
    assert all(0 < abs(row["loss"] - results["control"]["loss"]) < 1 for row in results["training_free"].values())
    assert all(3.5 < row["achieved_ratio"] < 4.5 for row in results["training_free"].values())
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
