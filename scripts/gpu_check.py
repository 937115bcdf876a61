"""Check a machine's GPUs in one go: python scripts/gpu_check.py; see benchmarks/gpu_check.py."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def main() -> None:
    if not BENCHMARKS.is_dir():
        sys.exit(
            f"error: {BENCHMARKS} does not exist: the check runs the tests and benchmarks of a checkout; clone the "
            "repository and run `pip install -e .` there"
        )
    sys.path.insert(0, str(BENCHMARKS))
    runpy.run_path(str(BENCHMARKS / "gpu_check.py"), run_name="__main__")


if __name__ == "__main__":
    main()
