"""The part of `dmc gpu-check` that starts vLLM, on little."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1.engine.llm_engine", reason="vLLM is not installed here")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import gpu_check
from vllm.envs import disable_envs_cache

pytestmark = pytest.mark.vllm


def test_it_compares_tokens_and_counts_requests(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")  # its kernels are slow where Triton interprets them
    disable_envs_cache()
    rows = tmp_path / "rows"
    arguments = ["--device", "cpu", "--tiny", "--part", "vllm", "--output", str(tmp_path), "--rows", str(rows)]
    assert gpu_check.main(arguments) == 0
    found = {row["measured"]: row for row in map(json.loads, rows.read_text().splitlines()[1:])}
    assert found.pop("answers with the tokens of Engine")["holds"]
    held = [row["value"] for row in found.values() if row["unit"] == "requests"]
    assert len(held) == 2 and held[1] > 2 * held[0]
    assert len(found) == 4 and all(row["value"] > 0 for row in found.values())
