"""Runs the tests of `dmc.vllm` in .venv-vllm: vLLM asks for older transformers and for gigabytes of CUDA packages."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OWN = ROOT / ".venv-vllm"
SETTINGS = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
"""Lets vLLM take Triton's interpreter for a GPU's Triton."""


@pytest.mark.vllm
@pytest.mark.skipif(not (OWN / ".installed").exists(), reason="needs vLLM in .venv-vllm, which scripts/test.sh makes")
@pytest.mark.parametrize("is_server", [False, True], ids=["engine", "server"])
def test_in_an_environment_with_vllm(is_server):
    """All that runs in one process at once, for to import vLLM takes twenty seconds."""
    chosen = ["tests/vllm/test_serve.py"] if is_server else ["tests/vllm", "--ignore", "tests/vllm/test_serve.py"]
    command = [str(OWN / "bin" / "python"), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *chosen]
    settings = os.environ | SETTINGS | ({} if is_server else INTERPRETED)
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=900, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
