"""Every benchmark program runs, on little, and keeps what it prints."""

import csv
import json
import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
LITTLE = {
    "training_kernels": "--shapes 1,2,1,32,16 --rounds 1",
    "training_attention": "--shapes 1,2,1,64,16 --delay 8 --window 8 --rounds 1",
    "decode_kernels": "--kernels reference --decode 1,1,2,64,16 --prefill 1,1,2,32,16 --rounds 1",
    "policies": "--kv_heads 2 --decode 1,64 --prefill --decode_rounds 1",
    "prefill": "--prompt_length 16",
    "cpu_speed": "--decode 1x8 --prefill 8 --steps 2 --rounds 1",
    "host_step": "--sequences 2 --rounds 3",
    "carried_cache": "--prompt_length 16 --rounds 1 --layers 1",
}


def test_every_program_is_tried():
    assert {path.stem for path in BENCHMARKS.glob("*.py")} == {
        *LITTLE,
        "timings",
        "gpu_check",
        "parity",
        "compiled_kernels",
        "vllm_check",
        "training_bytes",
        "ship_gates",
    }


@pytest.mark.parametrize("name", LITTLE)
def test_what_is_printed_is_kept_as_csv_and_json(name, tmp_path, monkeypatch, capsys):
    arguments = f"{LITTLE[name]} --threads 1 --output {tmp_path / 'out'}".split()
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    with (tmp_path / "out" / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 4
    for row in rows:
        assert f"{row['setting']}, ms\n" in printed
        assert f"  {row['case']:36s}{float(row['milliseconds']):10.2f}  {float(row['of_first']):6.2f}x\n" in printed
    record = json.loads((tmp_path / "out" / f"{name}.json").read_text())
    assert [entry["milliseconds"] for entry in record["rows"]] == [float(row["milliseconds"]) for row in rows]
    assert f"{name}.py" in record["provenance"]["command"]
