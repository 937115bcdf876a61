"""Check a machine's GPUs in one go: dmc gpu-check; see benchmarks/gpu_check.py."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def main(arguments: Sequence[str]) -> None:
    """Run the check of a checkout."""
    if not BENCHMARKS.is_dir():
        sys.exit(
            f"error: {BENCHMARKS} does not exist: the check runs the tests and benchmarks of a checkout; clone the "
            "repository and run `pip install -e .` there"
        )
    sys.path.insert(0, str(BENCHMARKS))
    sys.argv[:] = ["dmc gpu-check", *arguments]
    runpy.run_path(str(BENCHMARKS / "gpu_check.py"), run_name="__main__")
