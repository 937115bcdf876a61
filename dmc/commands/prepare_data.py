"""Tokenize a run's text ahead of it, on a machine without GPUs."""

from __future__ import annotations

from typing import Any

from hydra.core.hydra_config import HydraConfig

from dmc.training.config import run_config


def main(settings: Any) -> None:
    """Tokenize, and print the folders."""
    config = run_config(settings, HydraConfig.get().overrides.task)  # checked before all that is imported next
    from dmc.training.text_data import prepare_text

    print(*prepare_text(config), sep="\n")
