"""Compare methods at equal memory. A restart continues; processes and sweeps (-m) may share an output folder."""

from __future__ import annotations

from typing import Any

from dmc.config import build_config
from dmc.models.loading import load_with_tokenizer
from dmc.results.compare import compare
from dmc.results.grid import CompareConfig
from dmc_cli.hydra_command import CONFIGS


def main(settings: Any) -> None:
    """Compare, and print the tables."""
    print(compare(build_config(CompareConfig, settings), CONFIGS, load_with_tokenizer))
