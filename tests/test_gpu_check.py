"""The check of a GPU, on a machine without one: its parts on little, and parts that fail or hang."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_check  # noqa: E402
from gpu_check import CHECKS, GATES, Part  # noqa: E402
from parity import SETTINGS  # noqa: E402

WRITES = "import sys, json; open(sys.argv[1], 'a').write(json.dumps({'measured': 'a', 'value': 2.0, 'unit': 's', 'beside': '', 'holds': True}) + chr(10)); "  # noqa: E501


def python(program, seconds=20):
    return Part("a part", seconds, (sys.executable, "-c", program))


def test_a_part_that_fails_and_one_that_hangs_stop_no_other(tmp_path):
    child = "import subprocess; subprocess.run(['sleep', '60'])"
    parts = {
        "fails": python(WRITES + "raise SystemExit('it broke')"),
        "hangs": python(WRITES + child, seconds=2),
        "works": python(WRITES),
    }
    rows = gpu_check.run_parts(parts, tmp_path)
    assert [(row["part"], row["measured"], row["holds"]) for row in rows] == [
        (part, *end) for part, holds in (("fails", False), ("hangs", False), ("works", True))
        for end in (("a", True), ("this part", holds))
    ]  # fmt: skip
    assert "it broke" in rows[1]["beside"] and "ended after 2 s" in rows[3]["beside"]
    assert json.loads((tmp_path / "gpu_check.json").read_text())["rows"] == rows
    assert "it broke" in (tmp_path / "fails.log").read_text()
    table = (tmp_path / "gpu_check.md").read_text()
    assert table.count("\n") == 2 + len(rows) and "**no**" in table


def test_a_part_that_fails_on_a_gpu_runs_again_with_blocking_launches(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    program = "import os; raise SystemExit(f'blocking: {os.environ.get(\"CUDA_LAUNCH_BLOCKING\")}')"
    (last,) = gpu_check.run_part("fails", python(program), tmp_path)
    assert not last["holds"] and "fails.blocking.log" in last["beside"]
    assert "blocking: None" in (tmp_path / "fails.log").read_text()
    assert "blocking: 1" in (tmp_path / "fails.blocking.log").read_text()


@pytest.mark.slow
def test_the_dry_form_reaches_every_triton_kernel_and_gives_the_reference(tmp_path):
    """Prompts in chunks beside decoding, then tokens one by one, by Triton's interpreter."""
    pytest.importorskip("triton", reason="triton is not installed")
    rows = tmp_path / "rows"
    command = [sys.executable, gpu_check.__file__, "--device", "cpu", "--tiny", "--part", "parity", "--rows", str(rows)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=600)
    found = {row["measured"]: row for row in map(json.loads, rows.read_text().splitlines())}
    assert not [name for name, row in found.items() if row["holds"] is False]
    reached = found["Triton kernels that ran"]
    assert reached["holds"], reached["beside"]
    assert found["top_p, tokens of its definition"]["holds"]
    for name in ("full cache", *GATES, *SETTINGS):
        assert name.startswith("CUDA graphs") or found[f"triton, {name}, float32"]["holds"]


def test_without_a_gpu_it_says_what_it_would_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_check.main(["--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name}: " in printed for name in CHECKS) and not (tmp_path / "out").exists()
    minutes = {name: seconds / 60 for name, (_, seconds) in CHECKS.items()}
    assert sum(minutes.values()) < 43 and sum(minutes.values()) - minutes["vllm"] < 28


def test_the_command_of_a_wheel_without_benchmarks_says_what_it_needs(tmp_path, monkeypatch):
    script = runpy.run_path(str(ROOT / "scripts" / "gpu_check.py"))["main"]
    monkeypatch.setitem(script.__globals__, "BENCHMARKS", tmp_path / "benchmarks")
    with pytest.raises(SystemExit, match=r"error: .*benchmarks does not exist: .* of a checkout; clone"):
        script()


def test_the_part_for_vllm_says_in_one_line_that_there_is_none(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert gpu_check.main(["--device", "cpu", "--tiny", "--part", "vllm"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "pip install '.[vllm]'" in json.loads(line)["beside"]


LONG = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in sorted(CHECKS.keys() - {"tests", "vllm", "training", "kernels"})
]


@pytest.mark.parametrize("name", ["training", "kernels", *LONG])
def test_every_part_runs_on_little(name, tmp_path):
    assert gpu_check.main(["--device", "cpu", "--tiny", "--part", name, "--rows", str(tmp_path / "rows")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert len(rows) >= (1 if name == "trainers" else 4) and not any(row["holds"] is False for row in rows)
    assert gpu_check.table_of([{"part": name, **row} for row in rows])
