"""Rows of benchmark.py as speeds."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from dmc.results.benchmark import Measurement
from dmc.results.report.findings import Findings, LargestBatch, Speed
from dmc.results.row_names import label_settings

NAMES = [each.name for each in fields(Measurement)]


def add_benchmark(rows: list[dict[str, Any]], folder: str, findings: Findings) -> None:
    """Add measurements and largest batches; of the same command's the newest counts.

    Args:
        rows: in the order in which they were written.
        folder: where they lie.
        findings: to add to.
    """
    rows = _told_apart(rows)
    newest = {(row["command"], row["name"], row["batch_size"] if "memory" not in row else None): row for row in rows}
    for row in newest.values():
        source = findings.add_source(folder, row)
        if "memory" in row:
            findings.largest_batches.append(LargestBatch(row["ratio"], row["memory"], row["batch_size"], source))
        else:
            findings.speeds.append(Speed(Measurement(**{name: row[name] for name in NAMES}), source))
    if len(newest) < len(rows):
        findings.notes.append(
            f"{folder}: {len(rows) - len(newest)} earlier measurements of the same command are left out"
        )


def _told_apart(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write the settings of a sweep's jobs, which have the same command, behind it where they differ."""
    settings = [{name: value for name, value in row.get("settings", {}).items() if name != "output"} for row in rows]
    found = []
    for row, own in zip(rows, settings, strict=True):
        others = [each for other, each in zip(rows, settings, strict=True) if other["command"] == row["command"]]
        label = label_settings(own, others) if own else ""
        found.append(row | ({"command": f"{row['command']} ({label})"} if label else {}))
    return found
