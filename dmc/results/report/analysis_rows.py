"""What analyse.py has written: CR of layers and heads, its course over a text or a training run, segment lengths."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dmc.policies.from_config import budget_name, parse_budget
from dmc.results.report.findings import Findings, Inside, Profile, Segments

MOST_PLACES = 64
"""Places of a curve; more are drawn as the mean of neighbours."""


def add_analysis(record: dict[str, Any], folder: Path, findings: Findings) -> None:
    """Add what one run of analyse.py has found out; files of an earlier run in the same folder are left alone.

    Args:
        record: what `analysis.json` holds.
        folder: where it lies.
        findings: to add to.
    """
    config, files = record["config"], set(record["files"])
    readers: dict[str, Callable[[Path], Profile]] = {
        "ratio_over_length.csv": lambda path: _read_layers(path, "compression ratio"),
        "decision_over_position.csv": lambda path: _thin(_read_layers(path, "share merged or dropped")),
        "survivors.csv": lambda path: _thin(_read_survivors(path)),
        "ratio_over_training.csv": _read_training,
    }
    findings.insides.append(
        Inside(
            name=_name(config),
            text=f"{config['num_sequences']} x {config['sequence_length']:,} tokens" if config["model"] else "",
            ratios=_read_heads(folder, files, config["sequence_length"] + config["new_tokens"] - 1),
            profiles=[read(folder / name) for name, read in readers.items() if name in files],
            segments=_read_segments(folder / "segment_lengths.csv") if "segment_lengths.csv" in files else None,
            source=findings.add_source(str(folder), record["provenance"]),
        )
    )


def _name(config: dict[str, Any]) -> str:
    """Name model, policy and budget, or a training run."""
    if config["model"] is None:
        return Path(config["run"]).name
    name = "/".join(Path(config["model"]["path"]).parts[-2:])
    if config["policy"]:
        budget = parse_budget(config["budget"])
        asked = f"CR {budget_name(budget)}" if budget.tokens is None else f"{budget.tokens} tokens"
        name += f", {config['policy']['_target_'].rpartition('.')[2]} at {asked}"
    return name


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _read_heads(folder: Path, files: set[str], num_tokens: int) -> list[list[float]]:
    """Read the compression ratio of each layer and head: of a text, or else at the end of a training run."""
    if "ratio_by_head.csv" in files:
        cells = [(row, float(row["ratio"])) for row in _read(folder / "ratio_by_head.csv")]
    elif "entries_by_head.csv" in files:
        cells = [(row, num_tokens / float(row["entries"])) for row in _read(folder / "entries_by_head.csv")]
    else:
        rows = _read(folder / "ratio_over_training.csv")
        cells = [(row, float(row["ratio"])) for row in rows if row["step"] == rows[-1]["step"]]
    layers: dict[str, list[float]] = {}
    for row, ratio in cells:
        layers.setdefault(row["layer"], []).append(ratio)
    return list(layers.values())


def _read_layers(path: Path, measure: str) -> Profile:
    rows = _read(path)
    axis, of_all, *layers = rows[0]
    columns = [[float(row[name]) for row in rows] for name in (axis, of_all, *layers)]
    return Profile(axis, measure, columns[0], columns[1], columns[2:])


def _read_survivors(path: Path) -> Profile:
    layers: dict[str, list[float]] = {}
    for row in _read(path):
        shares = [float(value) for name, value in row.items() if name.startswith("head_")]
        layers.setdefault(row["layer"], []).append(statistics.fmean(shares))
    of_layers = list(layers.values())
    of_all = [statistics.fmean(shares) for shares in zip(*of_layers, strict=True)]
    return Profile("position", "share still held", [float(place) for place in range(len(of_all))], of_all, of_layers)


def _read_training(path: Path) -> Profile:
    held: dict[float, dict[str, list[float]]] = {}
    for row in _read(path):
        held.setdefault(float(row["step"]), {}).setdefault(row["layer"], []).append(1 / float(row["ratio"]))
    by_step = [[statistics.fmean(heads) for heads in layers.values()] for layers in held.values()]
    of_layers = [[1 / share for share in shares] for shares in zip(*by_step, strict=True)]
    of_all = [1 / statistics.fmean(shares) for shares in by_step]
    return Profile("step", "compression ratio", list(held), of_all, of_layers)


def _read_segments(path: Path) -> Segments | None:
    rows = _read(path)
    return Segments([int(row["tokens"]) for row in rows], [int(row["all"]) for row in rows]) if rows else None


def _thin(profile: Profile) -> Profile:
    width = max(1, len(profile.places) // MOST_PLACES)
    starts = range(0, len(profile.places) // width * width, width)

    def means(values: list[float]) -> list[float]:
        return [statistics.fmean(values[start : start + width]) for start in starts]

    places = [profile.places[start] for start in starts]
    layers = [means(values) for values in profile.of_layers]
    return Profile(profile.axis, profile.measure, places, means(profile.of_all), layers)
