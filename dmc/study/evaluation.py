"""Measure the models of a study with the same tasks and write what they cost."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dmc.loading import load_with_tokenizer
from dmc.results.compare import run_cells, unfinished
from dmc.results.compare_report import replace_file, untold, write_report
from dmc.results.grid import FULL, CompareConfig, named_settings, plan_grid, plan_methods
from dmc.results.store import Row, Store
from dmc.study.plan import CONTROL, StudyConfig, StudyRun
from dmc.study.table import format_costs, study_costs
from dmc.target import build_target

METRICS = ("loss", "far_repeat_loss")
"""Of all tokens, and of those that repeat something far back."""


def check_measurements(config: StudyConfig, configs: Path) -> None:
    """Look up all policies, budgets and tasks, so that hours of training do not end in a word that is spelled wrong.

    Raises:
        ValueError, FileNotFoundError: see `plan_grid`.
    """
    plan_methods(named_settings(config.policies, configs / "policy", "policies"), config.budgets)
    for name, settings in named_settings(config.tasks, configs / "task", "tasks").items():
        build_target(settings, f"tasks.{name}")


def evaluate_runs(config: StudyConfig, runs: Sequence[StudyRun], configs: Path) -> list[Row]:
    """Run all policies on the controls, and every other model as it is; finished cells are not run again.

    Args:
        config: policies, budgets, tasks.
        runs: finished ones.
        configs: folder that holds `policy/*.yaml` and `task/*.yaml`.
    Returns:
        The rows of these runs under these settings; the folder may hold others.
    Raises:
        ValueError, FileNotFoundError: see `plan_grid`.
    """
    store = Store(Path(config.output) / "compare" / "cells.jsonl")
    controls = {run.seed: run.label for run in runs if run.name == CONTROL}
    finals = {run.label: str(run.final) for run in runs}
    grids: list[tuple[list[str], list[Any], list[Any], str | None]] = [
        (list(controls.values()), config.policies, config.budgets, None)
    ]
    for seed, control in controls.items():  # every other run beside the control of its seed
        grids.append(([run.label for run in runs if run.seed == seed], [FULL], [], control))
    keys: list[str] = []
    for labels, policies, budgets, reference in grids:
        if labels:
            models = {label: finals[label] for label in labels}
            settings = CompareConfig(
                models, policies, config.tasks, budgets, config.engine, 0, reference=reference, output=config.output
            )
            grid = plan_grid(settings, configs)
            keys += [cell.key for cell in grid.cells]
            cells = unfinished(grid.cells, store.rows())
            run_cells(cells, grid, settings, store, lambda model: load_with_tokenizer(**asdict(model)))
    rows = {row["key"]: row for row in store.rows()}
    return [rows[key] for key in dict.fromkeys(keys) if key in rows]


def write_results(config: StudyConfig, rows: list[Row], runs: Sequence[StudyRun]) -> str:
    """Write `study.md`, `study.csv` and `study.json`, and the comparison's own table and files; return the first."""
    folder = Path(config.output)
    costs = study_costs(rows, runs, METRICS)
    table = "\n\n".join([format_costs(costs), *untold(rows)]).strip()
    columns: list[dict[str, Any]] = [cost.columns() for cost in costs]
    replace_file(folder / "study.md", f"{table}\n".encode())
    replace_file(folder / "study.json", f"{json.dumps(columns, indent=1)}\n".encode())
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(columns[0]) if columns else [])
    writer.writeheader()
    writer.writerows(columns)
    replace_file(folder / "study.csv", file.getvalue().encode())
    write_report(Store(folder / "compare" / "cells.jsonl").rows(), folder / "compare")
    return table
