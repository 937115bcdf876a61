"""Rerun the study: python scripts/study.py (see configs/study.yaml). A restart continues it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dmc.config.command_line import script

ROOT = Path(__file__).resolve().parent.parent


@script("study")
def main(settings: DictConfig) -> None:
    from dmc.commands.study import StudyConfig, check_measurements, evaluate_runs, plan_bases, plan_runs, train_runs
    from dmc.config import build_config

    values: Any = OmegaConf.to_container(settings, resolve=True)
    config = build_config(StudyConfig, values)
    check_measurements(config, ROOT / "configs")
    for base in plan_bases(config):  # each may start from the one before
        if train_runs([base], ROOT / "scripts" / "train.py", processes=1):
            sys.exit(f"error: {base.label} failed, see {base.log}")
    runs = plan_runs(config)
    failed = train_runs(runs, ROOT / "scripts" / "train.py", config.processes)
    try:
        print(evaluate_runs(config, [run for run in runs if run.is_finished], ROOT / "configs"))
    finally:
        if names := [f"{run.label} ({run.log})" for run in failed]:
            print(f"failed: {', '.join(names)}", file=sys.stderr)
    sys.exit(f"error: {len(failed)} trainings failed" if failed else 0)


if __name__ == "__main__":
    main()
