"""Rerun the study: python scripts/study.py (see configs/study.yaml). A restart continues it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hydra_command import CONFIGS, command

TRAIN = Path(__file__).resolve().with_name("train.py")


@command("study")
def main(settings: Any) -> None:
    from dmc.commands.study import StudyConfig, run_study
    from dmc.config import build_config

    sys.exit(run_study(build_config(StudyConfig, settings), TRAIN, CONFIGS))


if __name__ == "__main__":
    main()
