"""Compare methods: python scripts/compare.py 'models={base: DIR, cr4: DIR}' policies=[full,h2o] budgets=[2,4].

Start it again and it goes on; several processes and sweeps (-m) may share one output folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from transformers import AutoTokenizer

from dmc import load_model
from dmc.config import build_config
from dmc.evaluation.compare import run_cells, unfinished
from dmc.evaluation.compare_report import CSV, PLOT, TABLE, write_report
from dmc.evaluation.grid import CompareConfig, ComparedModel, plan_grid
from dmc.evaluation.row_store import RowStore

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def load(model: ComparedModel) -> tuple[Any, Any]:
    """Load a model, on the GPU if there is one, and its tokenizer if it has one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.path, revision=model.revision, trust_remote_code=False)
    except (OSError, ValueError):
        tokenizer = None
    return load_model(model.path, dtype=model.dtype, revision=model.revision).to(device), tokenizer


@hydra.main(version_base="1.3", config_path="../configs", config_name="compare")
def main(settings: DictConfig) -> None:
    try:
        if OmegaConf.is_missing(settings, "models"):
            raise ValueError("give a value for models: 'models={base: DIR}', a name and a folder or hub name for each")
        values: Any = OmegaConf.to_container(settings, resolve=True)
        config = build_config(CompareConfig, values)
        grid = plan_grid(config, CONFIGS)
        folder = Path(config.output)
        store = RowStore(folder / "cells.jsonl")
        cells = unfinished(grid.cells, store.rows())
        print(f"{len(grid.cells)} cells, {len(grid.cells) - len(cells)} finished before: {store.path}", file=sys.stderr)
        run_cells(cells, grid, config, store, load)
    except (ValueError, FileNotFoundError, NotImplementedError) as error:
        sys.exit(f"error: {error}")
    table = write_report(store.rows(), folder, config.reference)
    print(f"\n{table}\n\n{store.path}, {folder / TABLE}, {folder / CSV}, {folder / PLOT}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))  # where a user's own policies and tasks lie
    main()
