"""The check of a GPU, on a machine without one: its parts on little, and parts that fail or hang."""

import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_check  # noqa: E402
from gpu_check import CHECKS, Part  # noqa: E402

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
    table = (tmp_path / "gpu_check.md").read_text()
    assert table.count("\n") == 2 + len(rows) and "**no**" in table


def test_without_a_gpu_it_says_what_it_would_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_check.main(["--output", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert all(f"  {name}: " in told for name in CHECKS) and not (tmp_path / "out").exists()
    assert sum(seconds for _, seconds in CHECKS.values()) < 9 * 60


def test_the_command_of_a_wheel_without_benchmarks_says_what_it_needs(tmp_path, monkeypatch):
    script = runpy.run_path(str(ROOT / "scripts" / "gpu_check.py"))["main"]
    monkeypatch.setitem(script.__globals__, "BENCHMARKS", tmp_path / "benchmarks")
    with pytest.raises(SystemExit, match=r"error: .*benchmarks does not exist: .* of a checkout; clone"):
        script()


@pytest.mark.parametrize("name", [name for name in CHECKS if name != "tests"])
def test_every_part_runs_on_little(name, tmp_path):
    assert gpu_check.main(["--device", "cpu", "--tiny", "--part", name, "--rows", str(tmp_path / "rows")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert len(rows) >= 4 and not any(row["holds"] is False for row in rows)
    assert gpu_check.table_of([{"part": name, **row} for row in rows])
