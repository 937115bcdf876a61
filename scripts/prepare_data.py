"""Tokenize a run's text ahead of it, on a machine without GPUs: python scripts/prepare_data.py experiment=NAME."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from dmc.command_line import script


@script("prepare_data")
def main(settings: DictConfig) -> None:
    from dmc.config import run_config

    config = run_config(settings)  # checked before all that is imported next
    from dmc.data import format_report
    from dmc.data.report import REPORT_NAME
    from dmc.training import prepare_text

    reports = prepare_text(config)
    print(f"{format_report(reports)}\n\n{Path(config.data.cache_folder) / REPORT_NAME}")


if __name__ == "__main__":
    main()
