"""Tokenize a run's text ahead of it, on a machine without GPUs: python scripts/prepare_data.py experiment=NAME."""

from __future__ import annotations

from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra_command import command


@command("prepare_data")
def main(settings: Any) -> None:
    from dmc.training.config import run_config

    config = run_config(settings, HydraConfig.get().overrides.task)  # checked before all that is imported next
    from dmc.training.text_data import prepare_text

    print(*prepare_text(config), sep="\n")


if __name__ == "__main__":
    main()
