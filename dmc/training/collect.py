"""The results of a sweep in one table and one picture: quality against compression ratio."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from matplotlib.figure import Figure

from dmc.export import METRICS_NAME, is_of_last_step
from dmc.json_file import read_mapping
from dmc.training.record import CONFIG_NAME


@dataclass(frozen=True)
class Result:
    """One exported model of a run."""

    run: str
    """The run's folder."""
    model: str
    """`final`, or the snapshot's name."""
    target_ratio: float
    """CR asked for; 1 without gates."""
    achieved_ratio: float
    """CR of the thresholded decisions on the same text as the loss."""
    loss: float
    """Nats per token."""
    split: str
    """Of the run's text: test, or validation where the run has no test text."""


def collect(folder: Path) -> tuple[list[Result], list[str]]:
    """Find the exported models of all runs in a folder.

    Args:
        folder: of one run, or of several at any depth.
    Returns:
        The models by target ratio, and the names of runs that have not finished.
    Raises:
        FileNotFoundError: there is no run.
    """
    runs = sorted(path.parent for path in folder.rglob(CONFIG_NAME))
    if not runs:
        raise FileNotFoundError(f"{folder} holds no run: folder= is what output_dir= was, of a run or of a sweep")
    results = []
    for run in runs:
        for path in (*([run / "final"] if _is_finished(run) else []), *(run / "snapshots").glob("*")):
            if (path / METRICS_NAME).is_file() and not path.name.startswith("."):
                results.append(_read(path, str(run.relative_to(folder))))
    unfinished = [str(run.relative_to(folder)) for run in runs if not _is_finished(run)]
    return sorted(results, key=lambda result: (result.target_ratio, result.run, result.model)), unfinished


def _is_finished(run: Path) -> bool:
    record = run / "final" / METRICS_NAME
    return record.is_file() and is_of_last_step(read_mapping(record)["metrics"])


def _read(path: Path, run: str) -> Result:
    record = read_mapping(path / METRICS_NAME)
    metrics, compression = record["metrics"], record["compression"] or {"target_ratio": 1.0}
    split, prefix = ("test", "test_") if "test_loss_nats_per_token" in metrics else ("validation", "")
    loss, ratio = metrics[f"{split}_loss_nats_per_token"], metrics[f"{prefix}achieved_ratio"]
    return Result(run, path.name, compression["target_ratio"], ratio, loss, split)


def format_table(results: list[Result]) -> str:
    """Write results as a Markdown table."""
    lines = ["| run | model | target CR | achieved CR | loss (nats/token) | text |", "|---|---|---|---|---|---|"]
    for result in results:
        shown = f"{result.target_ratio:g} | {result.achieved_ratio:.2f} | {result.loss:.4f} | {result.split}"
        lines.append(f"| {result.run} | {result.model} | {shown} |")
    return "\n".join(lines)


def write_results(results: list[Result], folder: Path) -> None:
    """Write `results.md`, `results.csv` and `results.png` into a folder."""
    (folder / "results.md").write_text(format_table(results) + "\n")
    with (folder / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [item.name for item in fields(Result)])
        writer.writeheader()
        writer.writerows(asdict(result) for result in results)
    plot_quality(results, folder / "results.png")


def plot_quality(results: list[Result], path: Path) -> None:
    """Draw loss against achieved CR as a PNG: the final models as one line, the snapshots of each run as another."""
    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    axes = figure.subplots()
    lines = {"final models": [result for result in results if result.model == "final"]}
    for result in results:
        if result.model != "final":
            lines.setdefault(f"snapshots of {result.run}", []).append(result)
    for label, points in lines.items():
        points = sorted(points, key=lambda result: result.achieved_ratio)
        axes.plot([point.achieved_ratio for point in points], [point.loss for point in points], marker="o", label=label)
    axes.set(xlabel="achieved compression ratio", ylabel="loss on held-out text (nats/token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
