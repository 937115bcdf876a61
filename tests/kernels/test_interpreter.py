"""The tests of Triton's kernels in processes whose interpreter runs them on a CPU: chosen before triton is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreter's process")
TESTS = Path(__file__).parents[1]
FILES = [
    "kernels/test_triton.py",
    "kernels/test_evict.py",
    "models/test_masked_attention.py",
    "models/test_token_losses.py",
]
QUICK, SLOW = 50, 30
"""Tests that each tier has at least."""


@pytest.mark.parametrize(
    ("options", "at_least"), [(["--quick"], QUICK), pytest.param(["-m", "slow"], SLOW, marks=pytest.mark.slow)], ids=str
)
def test_interpreted_kernels_pass_their_tests(options: list[str], at_least: int) -> None:
    command = [sys.executable, "-m", "pytest", *FILES, *options, "-k", "triton or test_kernels"]
    command += ["-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) >= at_least
