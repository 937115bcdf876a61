"""Compare methods at equal memory. A restart continues; processes and sweeps (-m) may share an output folder."""

from __future__ import annotations

from typing import Any

from dmc.config import build_config
from dmc.config.folder import CONFIGS
from dmc.models.loading import load_with_tokenizer
from dmc.results.compare import compare
from dmc.results.grid import CompareConfig


def main(settings: Any) -> None:
    """Compare, and print the tables."""
    print(compare(build_config(CompareConfig, settings), CONFIGS, load_with_tokenizer))
