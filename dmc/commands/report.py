"""One page out of folders of results; the results of a sweep's trainings as one such folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from dmc.config.settings import OutputFolder, checked_dataclass
from dmc.files import read_mapping
from dmc.results.curves import draw_curves, read_log
from dmc.results.leaderboard import write_leaderboard
from dmc.results.measurement import FULL, Row, new_row
from dmc.results.report import read_folders, write_page
from dmc.results.store import Store, replace_file
from dmc.results.tables import write_tables
from dmc.training.callbacks.validation import RATIOS_NAME, read_ratios
from dmc.training.model_folder import METRICS_NAME, is_of_last_step
from dmc.training.record import CONFIG_NAME

CURVES_NAME = "curves.png"
"""Picture of a run's log, in its folder."""


@checked_dataclass(frozen=True)
class ReportConfig:
    """A page of results."""

    folders: Annotated[list[str], Field(min_length=1)]
    """Folders with a `cells.jsonl`."""
    title: str
    reference: str | None = None
    """Stock model with whose full cache compressed models are compared; None: that of the comparison."""
    leaderboard: OutputFolder | None = None
    """Folder of results in the format of kvpress's leaderboard; None: none are written."""
    output: OutputFolder = "outputs/report"

    def __post_init__(self) -> None:
        if (Path(self.output) / "cells.jsonl").exists():
            raise ValueError(
                f"output={self.output} holds measurements, whose results.csv would be replaced: "
                f"choose another folder, such as {self.output}/report"
            )


def report(config: ReportConfig) -> Path:
    """Write the page, and the leaderboard's folders if requested, and return the path of the page."""
    folders = [Path(folder) for folder in config.folders]
    findings = read_folders(folders, config.reference)
    if config.leaderboard is not None:
        write_leaderboard(folders, Path(config.leaderboard))
    return write_page(findings, Path(config.output), config.title)


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
    tables = write_tables(store, folder, keys=[row["key"] for row in rows])
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
    return new_row(name, FULL, "text of the run", {"model": {}, "task": {"split": split}}, **figures)


def _row_along(name: str, path: Path) -> Row:
    try:
        steps, held = read_ratios(path)
    except (ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged or empty ({type(error).__name__}: {error})") from error
    places = {"step": steps, "layer": [*range(held.shape[1])], "samples": 1}
    figures: Row = {"achieved_ratio": float(1 / held[-1].mean()), "learned": True, "samples": 1}
    figures |= {"requested_ratio": round(figures["achieved_ratio"], 2), "head_ratios": (1 / held[-1]).tolist()}
    figures["by_step"] = places | {"compression_ratio": (1 / held.mean(-1)).tolist()}
    return new_row(name, FULL, "training", {"model": {}, "task": {}}, **figures)
