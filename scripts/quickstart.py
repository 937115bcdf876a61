"""The main job on the embedded default: python scripts/quickstart.py [retrofit settings, e.g. compression=dmc]."""

from __future__ import annotations

import sys
from pathlib import Path

from hydra import compose, initialize
from train import run_config

from dmc.config import RunConfig
from dmc.quickstart import run_quickstart


def experiment(name: str, overrides: list[str]) -> RunConfig:
    """Compose one of the quickstart's experiments."""
    return run_config(compose("train", overrides=[f"experiment=quickstart_{name}", *overrides]))


def main(overrides: list[str]) -> None:
    folder = Path("outputs/quickstart")
    try:
        with initialize(version_base="1.3", config_path="../configs"):
            base = experiment("base", [])
            control, retrofit = experiment("control", overrides), experiment("retrofit", overrides)
        run_quickstart(base, control, retrofit, folder)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
