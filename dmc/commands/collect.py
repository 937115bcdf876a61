"""Put the results of the trainings of a run or a sweep into one table, and draw their curves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dmc.files import read_mapping
from dmc.results.curves import draw_curves, read_log
from dmc.results.measurement import FULL, Row, new_row
from dmc.results.store import Store, replace_file
from dmc.results.tables import write_tables
from dmc.training.callbacks.validation import RATIOS_NAME, read_ratios
from dmc.training.model_folder import METRICS_NAME, is_of_last_step
from dmc.training.record import CONFIG_NAME

CURVES_NAME = "curves.png"
"""Picture of a run's log, in its folder."""
COLLECTED = ("text of the run", "training")
"""Tasks of what is collected, of an exported model and along its training: rows of what is gone are not shown."""


def collect(folder: Path) -> str:
    """Put the metrics of all runs in a folder into its store, draw each run's `curves.png`, and return tables."""
    rows, unfinished = read_runs(folder)
    for run in _runs_in(folder):
        if len(log := read_log(run)):
            ratio = "decided_ratio" if _counts_decided(run) else "achieved_ratio"
            replace_file(run / CURVES_NAME, draw_curves(log, ratio))
    store = Store(folder / "cells.jsonl")
    for row in rows:
        store.append(row)
    keys = {row["key"] for row in rows} | {row["key"] for row in store.rows() if row["task"] not in COLLECTED}
    tables = write_tables(store, folder, keys=keys)
    return f"{tables}\n\nnot finished: {', '.join(unfinished)}" if unfinished else tables


def read_runs(folder: Path) -> tuple[list[Row], list[str]]:
    """Read the metrics of all exported models of the runs in a folder, final ones and snapshots.

    For a retrofit also read every layer's ratio at each validation, the paper's figure 7.

    Args:
        folder: folder of one run, or of several at any depth.
    Returns:
        Rows for a `Store`, by target ratio, and the names of runs that have not finished.
    Raises:
        FileNotFoundError: there is no run.
        ValueError: the ratios along a run are damaged.
    """
    rows, unfinished = [], []
    for run in _runs_in(folder):
        name = run.name if run == folder else str(run.relative_to(folder))
        models = [run / "final"] if _is_measured(run / "final") else []
        unfinished += [] if models else [name]
        for path in (*models, *(run / "snapshots").glob("[!.]*")):
            if (path / METRICS_NAME).is_file():
                rows.append(_row_of(f"{name}/{path.name}", read_mapping(path / METRICS_NAME)))
        if (path := run / "heatmaps" / RATIOS_NAME).is_file():
            rows.append(_row_along(name, path))
    return sorted(rows, key=lambda row: (row["requested_ratio"], row["model"])), unfinished


def _runs_in(folder: Path) -> list[Path]:
    runs = sorted(path.parent for path in folder.rglob(CONFIG_NAME))
    if not runs:
        raise FileNotFoundError(f"{folder} holds no run: folder= is what output_dir= was, of a run or of a sweep")
    return runs


def _counts_decided(run: Path) -> bool:
    """Return whether a run's target counts decisions; False too where its record is damaged or of another version."""
    try:
        config = read_mapping(run / CONFIG_NAME).get("config")
    except ValueError:
        return False
    gates = config.get("compression") if isinstance(config, dict) else None
    return isinstance(gates, dict) and gates.get("target_counts") == "decided"


def _is_measured(final: Path) -> bool:
    record = final / METRICS_NAME
    return record.is_file() and is_of_last_step(read_mapping(record)["metrics"])


def _row_of(name: str, record: Mapping[str, Any]) -> Row:
    metrics, compression = record["metrics"], record["compression"]
    split, prefix = ("test", "test_") if "test_loss_nats_per_token" in metrics else ("validation", "")
    figures: Row = {"metrics": {"loss": metrics[f"{split}_loss_nats_per_token"]}, "main_metric": "loss", "split": split}
    figures |= {"higher_is_better": False, "achieved_ratio": metrics[f"{prefix}achieved_ratio"]}
    if compression is not None:
        figures |= {"learned": True, "requested_ratio": compression["target_ratio"]}
        figures["target_counts"] = compression.get("target_counts")
    return new_row(name, FULL, COLLECTED[0], {"model": {}, "task": {"split": split}}, **figures)


def _row_along(name: str, path: Path) -> Row:
    try:
        steps, held = read_ratios(path)
    except (ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged or empty ({type(error).__name__}: {error})") from error
    places = {"step": steps, "layer": [*range(held.shape[1])], "samples": 1}
    figures: Row = {"achieved_ratio": float(1 / held[-1].mean()), "learned": True, "samples": 1}
    figures |= {"requested_ratio": round(figures["achieved_ratio"], 2), "head_ratios": (1 / held[-1]).tolist()}
    figures["by_step"] = places | {"compression_ratio": (1 / held.mean(-1)).tolist()}
    return new_row(name, FULL, COLLECTED[1], {"model": {}, "task": {}}, **figures)


def main(settings: Any) -> None:
    """Collect, and print the tables."""
    print(collect(Path(str(settings["folder"]))))
