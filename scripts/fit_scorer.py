"""Fit KVpop's scorer to a stock model: python scripts/fit_scorer.py model=DIR output=outputs/scorer."""

from __future__ import annotations

from typing import Any

from hydra_command import command


@command("fit_scorer", on_devices=True)
def main(settings: Any) -> None:
    from dmc.config import build_config
    from dmc.training.scorer_fit import FitConfig, fit_scorer

    print(f"fitted {fit_scorer(build_config(FitConfig, settings))}")


if __name__ == "__main__":
    main()
