"""Tokenise a run's text ahead of it, on a machine without GPUs: python scripts/prepare_data.py experiment=NAME."""

from __future__ import annotations

import sys

from omegaconf import DictConfig
from train import run_config

from dmc.command_line import script


@script("prepare_data")
def main(settings: DictConfig) -> None:
    from dmc.data import format_report
    from dmc.training import prepare_text

    try:
        reports = prepare_text(run_config(settings))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(format_report(reports))


if __name__ == "__main__":
    main()
