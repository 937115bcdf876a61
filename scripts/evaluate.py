"""Run tasks with one model and one method: python scripts/evaluate.py model=DIR tasks=cs_qa policy=h2o budget.ratio=4.

A front of compare.py: start it again and it goes on; runs with other methods, and sweeps (-m), may share one output
folder and its table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from dmc.command_line import script
from dmc.loading import load_with_tokenizer
from dmc.results.compare import compare
from dmc.results.grid import grid_of_one

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@script("evaluate")
def main(settings: DictConfig) -> None:
    values: Any = OmegaConf.to_container(settings, resolve=True)
    print(compare(grid_of_one(values, HydraConfig.get().runtime.choices["policy"]), CONFIGS, load_with_tokenizer))


if __name__ == "__main__":
    main()
