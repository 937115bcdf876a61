"""Run the field's benchmarks: python scripts/evaluate.py model=DIR tasks=cs_qa policy=h2o budget.ratio=4.

Start it again and it goes on; runs with other methods, and sweeps (-m), may share one output folder and its table.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from dmc.command_line import script
from dmc.config import build_config
from dmc.loading import load_with_tokenizer
from dmc.results.compare import failed_cells, unfinished
from dmc.results.store import Store, check_kind

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@script("evaluate")
def main(settings: DictConfig) -> None:
    try:
        from dmc.results.evaluate import EvaluateConfig, plan_evaluation, run_evaluation
        from dmc.results.evaluate_report import write_evaluation_report
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}: pip install '.[eval]'") from error
    values: Any = OmegaConf.to_container(settings, resolve=True)
    policy = HydraConfig.get().runtime.choices["policy"]
    values["policy"] = {"name": policy, **values["policy"]} if values["policy"] else policy
    config = build_config(EvaluateConfig, values)
    evaluation = plan_evaluation(config, CONFIGS)
    store = Store(Path(config.output) / "cells.jsonl")
    check_kind(store.rows(), store.path, benchmarks=True)
    cells = unfinished(evaluation.cells, store.rows())
    print(f"{len(evaluation.cells)} tasks, {len(cells)} to run: {store.path}", file=sys.stderr)
    run_evaluation(evaluation, cells, config, store, lambda model: load_with_tokenizer(**asdict(model)))
    print(f"\n{write_evaluation_report(store.rows(), store.path.parent)}\n\nall of it: {store.path.parent}")
    if failed := failed_cells(evaluation.cells, store.rows()):
        raise ValueError(failed)  # the other jobs of a sweep go on


if __name__ == "__main__":
    main()
