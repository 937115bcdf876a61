"""`dmc gpu-check` as a file, also on a machine where this project is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dmc_cli.table import run

if __name__ == "__main__":
    run("gpu_check")
