"""The page: verdict, drawings, tables and where they come from in one HTML file, and the same as PNG, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dmc.results.compare_report import replace_file
from dmc.results.report.drawing import Drawing
from dmc.results.report.drawings import draw_all
from dmc.results.report.findings import Findings, Result
from dmc.results.report.tables import failure_table, result_table, speed_table
from dmc.results.report.verdict import judge

TITLE = "KV-cache compression: what it keeps, what it costs"
PAGE, CSV, JSON, PLOTS = "report.html", "results.csv", "report.json", "plots"


def write_page(findings: Findings, folder: Path, title: str = TITLE) -> Path:
    """Write `report.html`, `plots/*.png`, `results.csv` and `report.json`; earlier ones are replaced.

    Args:
        findings: what to show.
        folder: where to; made if need be.
        title: of the page.
    Returns:
        The page's path.
    """
    sections, verdict = draw_all(findings), judge(findings)
    tables = [result_table(findings), speed_table(findings), failure_table(findings)]
    environment = Environment(
        loader=PackageLoader("dmc.results.report", "."), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    page = environment.get_template("page.html").render(
        title=title,
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        verdict=verdict,
        sections={name: [(each, Markup(each.svg)) for each in drawings] for name, drawings in sections.items()},
        tables=[table for table in tables if table.rows],
        contents=_contents(findings),
        findings=findings,
        counts={number: _rows_of(findings, number) for number in range(len(findings.sources))},
        style=Markup((Path(__file__).parent / "page.css").read_text()),
        script=Markup((Path(__file__).parent / "page.js").read_text()),
    )
    folder.mkdir(parents=True, exist_ok=True)
    plots = [each for drawings in sections.values() for each in drawings]
    _write_plots(plots, folder / PLOTS, _plots_of(folder / JSON))
    replace_file(folder / CSV, _format_csv(findings.results).encode())
    data = {"verdict": asdict(verdict), **asdict(findings), "plots": [each.file_name for each in plots]}
    replace_file(folder / JSON, json.dumps(data, indent=1, default=str).encode())
    replace_file(folder / PAGE, page.encode())
    return folder / PAGE


def _plots_of(data: Path) -> list[str]:
    """Name the plots of the page before, by its own list: other pictures in their folder are somebody's."""
    try:
        names = json.loads(data.read_text())["plots"]
        return [Path(name).name for name in names if name.endswith(".png")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _write_plots(drawings: list[Drawing], folder: Path, earlier: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    for name in earlier:
        (folder / name).unlink(missing_ok=True)
    for each in drawings:
        replace_file(folder / each.file_name, each.png)


def _contents(findings: Findings) -> str:
    """Count what the page shows."""
    kinds: list[tuple[list[Any], str, str]] = [
        (findings.results, "result", "results"),
        (findings.speeds, "speed measurement", "speed measurements"),
        (findings.insides, "analysis", "analyses"),
        (findings.failures, "failed cell", "failed cells"),
    ]
    return ", ".join(f"{len(rows)} {many if len(rows) > 1 else one}" for rows, one, many in kinds if rows)


def _rows_of(findings: Findings, source: int) -> int:
    parts: list[list[Any]] = [findings.results, findings.speeds, findings.largest_batches, findings.failures]
    parts.append(findings.insides)
    return sum(each.source == source for part in parts for each in part)


def _format_csv(results: list[Result]) -> str:
    names = [each.name for each in fields(Result) if each.name not in ("sample_values", "task_values")]
    file = io.StringIO()
    writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(result) for result in results)
    return file.getvalue()
