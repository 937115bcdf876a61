"""Read folders of compare.py, evaluate.py, benchmark.py, analyse.py and the quickstart; nothing is written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dmc.results.report.analysis_rows import add_analysis
from dmc.results.report.benchmark_rows import add_benchmark
from dmc.results.report.cell_rows import add_cells
from dmc.results.report.findings import Findings
from dmc.results.report.quickstart_rows import add_quickstart
from dmc.results.store import Row, Store

EXPECTED = (
    "expected a folder written by compare.py or evaluate.py (cells.jsonl), benchmark.py (results.jsonl), analyse.py "
    "(analysis.json) or the quickstart (results.json with base, control and final)"
)


def read_folders(folders: Sequence[Path], reference: str | None = None) -> Findings:
    """Read what folders of results hold.

    Args:
        folders: each of one kind.
        reference: stock model with whose full cache compressed models are compared; None: the one that compare.py was
            told, or else the only one.
    Raises:
        ValueError: none is given, or one is no folder, is empty or is of something else.
    """
    if not folders:
        raise ValueError("folders is empty: give folders=outputs/compare, one or several")
    findings = Findings()
    cells: dict[str, list[Row]] = {}
    for folder in dict.fromkeys(folders):
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder: {EXPECTED}")
        before = len(findings.sources)
        with _telling(str(folder)):
            rows = _read(folder, findings)
        if len(findings.sources) == before and not rows:
            raise ValueError(f"{folder} holds no results: {EXPECTED}")
        if rows:
            cells[str(folder)] = rows
    with _telling(", ".join(cells)):
        add_cells(cells, findings, reference)
    return findings


@contextmanager
def _telling(folders: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise ValueError(f"{folders}: a row is not of this project ({error!r}): {EXPECTED}") from error


def _read(folder: Path, findings: Findings) -> list[Row]:
    """Add what a folder holds; return the rows of its cells."""
    names = ("cells.jsonl", "results.jsonl", "results.json", "analysis.json")
    cells, speeds, quickstart, analysis = (folder / name for name in names)
    damaged, found = 0, []
    if cells.is_file():
        store = Store(cells)
        found = store.rows()
        damaged += store.num_damaged
    elif quickstart.is_file():
        add_quickstart(json.loads(quickstart.read_text()), folder, findings)
    if speeds.is_file():
        rows, torn = _read_lines(speeds)
        add_benchmark(rows, str(folder), findings)
        damaged += torn
    if analysis.is_file():
        add_analysis(json.loads(analysis.read_text()), folder, findings)
    if damaged:
        findings.notes.append(f"{folder}: {damaged} damaged lines are left out")
    return found


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    rows, damaged = [], 0
    for line in filter(None, map(str.strip, path.read_text(errors="replace").splitlines())):
        try:
            rows.append(json.loads(line))
        except ValueError:
            damaged += 1
    return rows, damaged
