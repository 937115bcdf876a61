"""Fit KVpop's scorer to a stock model."""

from __future__ import annotations

from typing import Any

from dmc.config import build_config
from dmc.training.scorer_fit import FitConfig, fit_scorer


def main(settings: Any) -> None:
    """Fit, and say where the scorer is."""
    print(f"fitted {fit_scorer(build_config(FitConfig, settings))}")
