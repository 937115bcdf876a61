"""The page: verdict, plots, tables and where they come from in one HTML file, and the same as PNG and CSV."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pandas
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from tqdm import tqdm

from dmc.files import RECORD_NAME
from dmc.results import plots
from dmc.results.equal_bytes import asked_of
from dmc.results.front_plot import draw_front
from dmc.results.fronts import CHOICE, COSTS, Front, fronts_of
from dmc.results.measurement import DONE, Row, to_frame
from dmc.results.statistics import beside_baselines, summarize
from dmc.results.store import Store, read_rows, replace_file
from dmc.results.tables import LEGEND, SPEEDS, all_tasks, problems_of, result_table, speed_table, speeds_of
from dmc.results.verdict import verdicts_of

TITLE = "KV-cache compression: what it keeps, what it costs"
PAGE, CSV, PLOTS = "report.html", "results.csv", "plots"
MARK = b'<section class="verdict"'
"""Words of every page: those of earlier versions have no record of their files beside them."""
EXPECTED = "expected a folder with cells.jsonl, as dmc compare, benchmark, collect, study and quickstart write it"
SECTIONS = {
    **{"layer head": "Compression of layers and heads", "length depth": "Answers by length and depth"},
    "instruction layer head": "What is left of each instruction",
    **dict.fromkeys(("position", "turn", "length", "entries"), "By position, turn or length"),
}
"""Sections of plots by their coordinates; others show what the cache holds."""


@dataclass
class Findings:
    """Everything that a page shows."""

    summary: pandas.DataFrame
    """Of `statistics.summarize`, with `name` (the method as labels say it), `label` (with its budget) and `source`."""
    places: pandas.DataFrame
    """Measurements with coordinates (main metrics, `compression_ratio`, `segments`), with `name` and `label`."""
    baselines: pandas.DataFrame
    """Of `statistics.beside_baselines`."""
    speeds: pandas.DataFrame
    """Of `tables.speeds_of`, with `source`."""
    fronts: list[Front]
    """Of `fronts.fronts_of`."""
    problems: list[str]
    """Of `tables.problems_of`."""
    claims: list[str] = field(default_factory=list)
    """What an audit says of each claim."""
    sources: list[dict[str, Any]] = field(default_factory=list)
    """Folder, command and environment of groups of rows, which the column `source` counts from 1."""


def read_folders(
    folders: Sequence[Path], reference: str | None = None, keys: Collection[str] | None = None
) -> Findings:
    """Read folders of results.

    Args:
        folders: folders with a store each.
        reference: stock model whose full cache compressed models are compared with; None: that of `dmc compare`, or
            else the only one.
        keys: keys of the rows to show; None: all.
    Raises:
        ValueError: none is given, or one is no folder, or holds no rows of this project.
    """
    if not folders:
        raise ValueError("folders is empty: give folders=[outputs/compare], one or several")
    stores = []
    for folder in dict.fromkeys(folders):
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder: {EXPECTED}")
        stores.append(Store(folder / "cells.jsonl"))
        if not stores[-1].rows():
            raise ValueError(f"{folder} holds no results: {EXPECTED}")
    rows = read_rows(stores, keys)
    sources, numbers = list[dict[str, Any]](), {}
    for row in rows:
        source = _source(row)
        sources += [] if source in sources else [source]
        numbers[row["key"]] = sources.index(source) + 1
    frame = to_frame(row for row in rows if row["status"] == DONE)
    several = frame[~frame["learned"] & (frame["by"] == "")]["variant"].nunique() > 1
    summary = plots.name_methods(summarize(frame, reference), several)
    if len(summary):
        summary["source"] = [numbers[keys[-1]] for keys in summary["keys"]]
    speeds = speeds_of(frame)
    speeds["source"] = speeds["key"].map(numbers)
    is_shown = frame["is_main"] | frame["metric"].isin(("compression_ratio", "segments", "share_held"))
    places = frame[(frame["by"] != "") & ~frame["by"].isin(SPEEDS) & is_shown]
    places = plots.name_methods(places.assign(asked=[asked_of(row) for _, row in places.iterrows()]), several)
    beside = beside_baselines(frame, reference)
    return Findings(summary, places, beside, speeds, fronts_of(frame), problems_of(rows), sources=sources)


def _source(row: Row) -> dict[str, Any]:
    """Return where a row comes from: folder, command and environment."""
    provenance = row["provenance"]
    source = {"folder": row["folder"], "command": provenance.get("command") or "unknown"}
    source |= {"commit": provenance.get("git_commit"), "versions": dict(provenance.get("versions") or {})}
    return source | {"machine": ", ".join(filter(None, (row.get("device"), provenance.get("machine"))))}


def write_page(findings: Findings, folder: Path, title: str = TITLE) -> Path:
    """Write `report.html`, `plots/NNN-*.png` and `results.csv`; those of an earlier page are replaced.

    Args:
        findings: content of the page.
        folder: output folder, made if missing.
        title: title of the page.
    Returns:
        The page's path.
    Raises:
        FileExistsError: the folder holds such files of something else; nothing is written.
    """
    before, written = names_of_page(folder), [CSV, PAGE]
    sections = dict[str, list[dict[str, Any]]]()
    (folder / PLOTS).mkdir(parents=True, exist_ok=True)
    for number, (section, plot) in enumerate(tqdm(_draw_all(findings), "plots", disable=None), start=1):
        slug = re.sub("[^a-z0-9]+", "-", plot.title.lower()).strip("-")[:60]
        written.append(f"{PLOTS}/{number:03d}-{slug}.png")
        replace_file(folder / written[-1], plot.png())
        drawn = {"title": plot.title, "caption": plot.caption, "svg": Markup(plot.svg(number))}
        sections.setdefault(section, []).append(drawn)
    environment = Environment(
        loader=PackageLoader("dmc.results.report", "."), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["kinds"] = _kinds
    page = environment.get_template("page.html").render(
        title=title,
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        verdicts=[
            *verdicts_of(findings.summary, findings.baselines),
            *(sentence for front in findings.fronts for sentence in front.sentences()),
        ],
        legend=LEGEND,
        sections=sections,
        tables=[table for table in _tables(findings) if len(table[2])],
        findings=findings,
    )
    summary = findings.summary.drop(columns=["keys"], errors="ignore")
    replace_file(folder / RECORD_NAME, (json.dumps(sorted(written), indent=1) + "\n").encode())
    replace_file(folder / CSV, summary.to_csv(index=False, lineterminator="\n").encode())
    replace_file(folder / PAGE, page.encode())
    for name in before.difference(written):
        (folder / name).unlink(missing_ok=True)
    return folder / PAGE


def names_of_page(folder: Path) -> set[str]:
    """Return the names of the plots of an earlier page that its record lists.

    Raises:
        FileExistsError: a page would replace files of something else.
    """
    page, record = folder / PAGE, folder / RECORD_NAME
    try:
        listed = {str(name) for name in json.loads(record.read_text())} if record.is_file() else None
    except (ValueError, TypeError):
        listed = set()
    is_page = PAGE in listed if listed is not None else page.is_file() and MARK in page.read_bytes()
    if other := next((path for path in (record, folder / CSV, page) if path.exists() and not is_page), None):
        raise FileExistsError(f"{other} is not of a page that was written here: give another output, or move it away")
    return {name for name in listed or () if re.fullmatch(rf"{PLOTS}/\d{{3}}-[a-z0-9-]*\.png", name)}


def _draw_all(findings: Findings) -> Iterator[tuple[str, plots.Plot]]:
    """Draw all plots, each with its section."""
    summary, quality = findings.summary, "Quality against memory"
    for _, lines in summary.groupby("task", sort=False) if len(summary) else ():
        yield quality, plots.draw_quality(lines)
    for front in findings.fronts:
        yield "Chains in the memory of a problem", draw_front(front)
    speeds = findings.speeds[findings.speeds["batch"].notna()]
    for (_, _, source), lines in speeds.groupby(["task", "length", "source"], sort=False):
        yield "Speed", plots.draw_speed(lines, f" (source {source})")
    for (_, by, _), lines in findings.places.groupby(["task", "by", "metric"], sort=False):
        for plot in plots.draw_places(lines):
            yield SECTIONS.get(str(by), "What the cache holds"), plot


def _tables(findings: Findings) -> Iterator[tuple[str, str, pandas.DataFrame]]:
    """Yield title, caption and texts of every table."""
    summary = findings.summary
    if len(summary):
        yield "All results", "", result_table(summary, findings.baselines)
        if summary["task"].nunique() > 1:
            yield "All tasks", "✓: as good as the full cache. ✗: worse.", all_tasks(summary)
    for front in findings.fronts:
        yield f"Fronts: {front.task}, {COSTS[front.cost]}", CHOICE, front.table()
    if len(findings.speeds):
        yield "Speed and memory", "Medians. Decoders of one batch size ran in turns.", speed_table(findings.speeds)


def _kinds(texts: pandas.DataFrame) -> list[str]:
    """Return which columns sort as numbers: all their texts begin with one."""
    return ["number" if texts[name].str.match(r"[+-]?\d|-?$").all() else "" for name in texts]
