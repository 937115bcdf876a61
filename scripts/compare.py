"""Compare methods: python scripts/compare.py 'models={base: DIR, cr4: DIR}' policies=full,h2o budgets=2,4.

Start it again and it goes on; several processes and sweeps (-m) may share one output folder.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dmc.command_line import script
from dmc.config import build_config
from dmc.loading import load_with_tokenizer
from dmc.results.compare import failed_cells, run_cells, unfinished
from dmc.results.compare_report import CSV, PLACES, PLOT, TABLE, write_report
from dmc.results.grid import CompareConfig, plan_grid
from dmc.results.store import Store, check_kind

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@script("compare")
def main(settings: DictConfig) -> None:
    values: Any = OmegaConf.to_container(settings, resolve=True)
    config = build_config(CompareConfig, values)
    grid = plan_grid(config, CONFIGS)
    folder = Path(config.output)
    store = Store(folder / "cells.jsonl")
    check_kind(store.rows(), store.path, benchmarks=False)
    cells = unfinished(grid.cells, store.rows())
    print(f"{len(grid.cells)} cells, {len(grid.cells) - len(cells)} finished before: {store.path}", file=sys.stderr)
    run_cells(cells, grid, config, store, lambda model: load_with_tokenizer(**asdict(model)))
    table = write_report(store.rows(), folder, config.reference)
    files = ", ".join(str(folder / name) for name in (TABLE, CSV, PLACES, PLOT))
    print(f"\n{table}\n\n{store.path}, {files}")
    if failed := failed_cells(grid.cells, store.rows()):
        raise ValueError(failed)  # the other jobs of a sweep go on


if __name__ == "__main__":
    main()
