"""The page: verdict, plots, tables and where they come from in one HTML file, and the same as PNG, CSV and JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pandas
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from tqdm import tqdm

from dmc.results import plots
from dmc.results.equal_bytes import KIND
from dmc.results.measurement import DONE, NOT_FINITE, Row, to_frame
from dmc.results.statistics import asked_of, beside_rivals, summarize
from dmc.results.store import Store, read_rows
from dmc.results.tables import (
    LEGEND,
    SPEEDS,
    Columns,
    all_tasks,
    plus,
    reason,
    replace_file,
    result_table,
    speed_table,
    speeds_of,
    texts_of,
)

TITLE = "KV-cache compression: what it keeps, what it costs"
PAGE, CSV, JSON, PLOTS = "report.html", "results.csv", "report.json", "plots"
EXPECTED = (
    "expected a folder with cells.jsonl, as compare.py, benchmark.py, collect.py, study.py and the quickstart write it"
)
GATES_CAVEAT = "A model with gates of its own has other weights than the full cache it is compared with."
SECTIONS = {
    **{"layer head": "Compression of layers and heads", "length depth": "Answers by length and depth"},
    **dict.fromkeys(("position", "turn", "length", "entries"), "By position, turn or length"),
}
"""Where plots by place stand; others are what gates merge and policies leave."""


@dataclass
class Findings:
    """Everything that a page shows."""

    summary: pandas.DataFrame
    """Of `statistics.summarize`, with `name` (the method as labels say it), `label` (with its budget) and `source`."""
    places: pandas.DataFrame
    """Measurements with coordinates (main metrics, `compression_ratio`, `segments`), with `name` and `label`."""
    rivals: pandas.DataFrame
    """Of `statistics.beside_rivals`."""
    speeds: pandas.DataFrame
    """Of `tables.speeds_of`, with `source`."""
    failures: pandas.DataFrame
    notes: list[str]
    sources: list[dict[str, Any]] = field(default_factory=list)
    """Folder, command and environment of groups of rows, which the column `source` counts from 1."""


def read_folders(
    folders: Sequence[Path], reference: str | None = None, keys: Collection[str] | None = None
) -> Findings:
    """Read folders of results.

    Args:
        folders: folders with a store each.
        reference: stock model whose full cache compressed models are compared with; None: compare.py's reference, or
            else the only one.
        keys: keys of the rows to show; None: all.
    Raises:
        ValueError: none is given, or one is no folder, is empty or is of something else.
    """
    if not folders:
        raise ValueError("folders is empty: give folders=outputs/compare, one or several")
    stores, notes = [], []
    for folder in dict.fromkeys(folders):
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder: {EXPECTED}")
        stores.append(Store(folder / "cells.jsonl"))
        if not stores[-1].rows():
            raise ValueError(f"{folder} holds no results: {EXPECTED}")
        if stores[-1].num_damaged:
            notes.append(f"{folder}: {stores[-1].num_damaged} damaged lines are left out")
    try:
        return _read(stores, notes, reference, keys)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        where = ", ".join(str(store.path.parent) for store in stores)
        raise ValueError(f"{where}: a row is not of this project ({error!r}): {EXPECTED}") from error


def _read(stores: Sequence[Store], notes: list[str], reference: str | None, keys: Collection[str] | None) -> Findings:
    rows = read_rows(stores, keys)
    sources: list[dict[str, Any]] = []
    numbers = {row["key"]: _source(row, sources) for row in rows}
    frame = to_frame(row for row in rows if row["status"] == DONE)
    several = frame[~frame["own_gates"] & (frame["by"] == "")]["variant"].nunique() > 1
    summary = plots.name_methods(summarize(frame, reference), several)
    if len(summary):
        summary["source"] = [numbers[keys[-1]] for keys in summary["keys"]]
    speeds = speeds_of(frame)
    speeds["source"] = speeds["key"].map(numbers)
    is_shown = frame["is_main"] | frame["metric"].isin(("compression_ratio", "segments"))
    places = frame[(frame["by"] != "") & ~frame["by"].isin(SPEEDS) & is_shown]
    places = plots.name_methods(places.assign(asked=[asked_of(row) for _, row in places.iterrows()]), several)
    failures = pandas.DataFrame([_failure(row, numbers) for row in rows if row["status"] != DONE])
    return Findings(summary, places, beside_rivals(frame, reference), speeds, failures, notes, sources)


def _source(row: Row, sources: list[dict[str, Any]]) -> int:
    """Return the number of a row's command and environment, adding a new one if needed."""
    provenance = row["provenance"]
    source = {"folder": row["folder"], "command": provenance.get("command") or "unknown"}
    source |= {"commit": provenance.get("git_commit"), "versions": dict(provenance.get("versions") or {})}
    source["machine"] = ", ".join(filter(None, (row.get("device"), provenance.get("machine"))))
    if source not in sources:
        sources.append(source)
    return sources.index(source) + 1


def _failure(row: Row, numbers: dict[str, int]) -> dict[str, Any]:
    error = f"not finite: {reason(row)}" if row["status"] == NOT_FINITE else reason(row)
    asked = asked_of(row | {"is_full": row["budget"] is None and not row["own_gates"]})
    names = {name: row[name] for name in ("method", "task")}
    return names | {"asked": asked, "error": error, "source": numbers[row["key"]]}


def write_page(findings: Findings, folder: Path, title: str = TITLE) -> Path:
    """Write `report.html`, `plots/*.png`, `results.csv` and `report.json`; earlier ones are replaced.

    Args:
        findings: content of the page.
        folder: output folder, made if missing.
        title: title of the page.
    Returns:
        The page's path.
    """
    for name in _plots_of(folder / JSON):
        (folder / PLOTS / name).unlink(missing_ok=True)
    verdict, sections = headline_of(findings), dict[str, list[dict[str, Any]]]()
    for number, (section, plot, path) in enumerate(write_plots(findings, folder / PLOTS), start=1):
        drawn = {"title": plot.title, "caption": plot.caption, "file": path.name, "svg": Markup(plot.svg(number))}
        sections.setdefault(section, []).append(drawn)
    environment = Environment(
        loader=PackageLoader("dmc.results.report", "."), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["kinds"] = _kinds
    page = environment.get_template("page.html").render(
        title=title,
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        verdict=verdict,
        sections=sections,
        tables=[table for table in _tables(findings) if len(table[2])],
        contents=_contents(findings),
        findings=findings,
    )
    summary = findings.summary.drop(columns=["keys"], errors="ignore")
    data = {
        **{"verdict": verdict, "notes": findings.notes, "sources": findings.sources},
        **{name: _records(getattr(findings, name)) for name in ("rivals", "places", "speeds", "failures")},
        **{"results": _records(summary), "plots": [each["file"] for drawn in sections.values() for each in drawn]},
    }
    replace_file(folder / CSV, summary.to_csv(index=False, lineterminator="\n").encode())
    replace_file(folder / JSON, json.dumps(data, indent=1, default=str).encode())
    replace_file(folder / PAGE, page.encode())
    return folder / PAGE


def write_plots(findings: Findings, folder: Path) -> Iterator[tuple[str, plots.Plot, Path]]:
    """Write every plot as a PNG; yield its section, the plot and the file."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (section, plot) in enumerate(tqdm(_draw_all(findings), "plots", disable=None), start=1):
        slug = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in plot.title.lower())
        path = folder / f"{number:02d}-{'-'.join(filter(None, slug.split('-')))[:60]}.png"
        replace_file(path, plot.png())
        yield section, plot, path


def _records(frame: pandas.DataFrame) -> Any:
    frame = frame.drop(columns=["samples", "contexts", "settings", "provenance", "keys"], errors="ignore")
    return json.loads(frame.dropna(axis=1, how="all").to_json(orient="records"))


def _plots_of(data: Path) -> list[str]:
    """Name the plots of the page before, by its own list: other pictures in their folder are somebody's."""
    try:
        names = json.loads(data.read_text())["plots"]
        return [Path(name).name for name in names if name.endswith(".png")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _draw_all(findings: Findings) -> Iterator[tuple[str, plots.Plot]]:
    """Draw all plots, each with its section."""
    summary, quality, costs = findings.summary, "Quality against memory", "Budgets held, and speed"
    for _, lines in summary.groupby("task", sort=False) if len(summary) else ():
        if lines["bytes_per_token"].notna().all():
            yield quality, plots.draw_quality([lines])
        yield quality, plots.draw_quality([lines], "achieved_ratio")
    if len(summary) and len(
        asked := summary[~summary["is_full"] & ~summary["budget"].astype(str).str.startswith(KIND)]
    ):
        yield costs, plots.draw_ratios(asked)
    speeds = findings.speeds[findings.speeds["batch"].notna()]
    for (_, _, source), lines in speeds.groupby(["task", "length", "source"], sort=False):
        yield costs, plots.draw_speed(lines, f" (source {source})")
    for (_, by, _), lines in findings.places.groupby(["task", "by", "metric"], sort=False):
        for plot in plots.draw_places(lines):
            yield SECTIONS.get(str(by), "What gates merge and policies leave"), plot


def headline_of(findings: Findings) -> dict[str, Any]:
    """Return the results of `dmc.results.statistics` in words: a headline, points (subject, words) and caveats."""
    summary, headline, points = findings.summary, "No methods are compared on a task: see what follows.", []
    caveats = [f"Failed cells: {len(findings.failures)}, see below."] if len(findings.failures) else []
    if len(summary):
        headline = _headline(summary)
        points = [(str(task), _count(lines)) for task, lines in summary.groupby("task", sort=False)]
        caveats += [LEGEND, *([GATES_CAVEAT] if summary["own_gates"].any() else [])]
    return {"headline": headline, "points": [each for each in points if each[1]], "caveats": caveats}


def _headline(summary: pandas.DataFrame) -> str:
    """Name the smallest cache that is as good as the full one on every task that tells methods apart."""
    silent = [task for task, lines in summary.groupby("task", sort=False) if not lines["tells"].any()]
    told = summary[~summary["task"].isin(silent)]
    count, ends = told["task"].nunique(), f" Left out, for they tell nothing apart: {', '.join(silent)}."
    ends = ends if silent else ""
    if not count:
        why = "all have one figure, or the full cache hardly answers"
        return f"No task tells methods apart: {why} ({', '.join(silent)})."
    if told["lost"].isna().all():
        return f"Without a full cache on the same samples nothing says what compression costs.{ends}"
    on = f"all {count} tasks" if count > 1 else told["task"].iloc[0]
    good = told[(told["standing"] == "as good") & (told["share"] < 1)].groupby("label")["share"].agg(["mean", "count"])
    good = good[good["count"] == count]["mean"]
    if good.empty:
        return f"No smaller cache is shown to be as good as the full one on {on}.{ends}"
    words = f"{good.idxmin()} is the smallest cache shown to be as good as the full one on {on}"
    return f"{words}: {good.min():.0%} of its bytes.{ends}"


def _count(lines: pandas.DataFrame) -> str:
    """Count the smaller caches of a task that are as good as the full one, worse, or neither."""
    smaller = lines[lines["share"].notna() & (lines["share"] < 1) & lines["lost"].notna()]
    good, worse = (int((smaller["standing"] == each).sum()) for each in ("as good", "worse"))
    told = f"Of {len(smaller)} smaller caches {good} are as good as the full one, {worse} worse; of "
    return f"{told}{len(smaller) - good - worse} the samples cannot tell." if len(smaller) else ""


def _tables(findings: Findings) -> Iterator[tuple[str, str, pandas.DataFrame]]:
    """Yield title, caption and texts of every table."""
    summary, rivals = findings.summary, findings.rivals
    if len(summary):
        yield "All results", "", result_table(summary, rivals[:0])  # rivals have a table of their own
        if summary["task"].nunique() > 1:
            yield "All tasks", "✓: as good as the full cache. ✗: worse. Neither: cannot tell.", all_tasks(summary)
    if len(rivals):
        caption = "How much better the model is than the training-free method in as many bytes; negative: worse."
        columns: Columns = {
            "model": ("variant", ""), "task": ("task", ""), "metric": ("metric", ""),
            "training-free": lambda each: each["rival"] + (" ★" if each["is_best"] else ""),
            "the model is better by": lambda each: plus(each["gap"], each["gap_error"]),
            "verdict on the model": lambda each: each["standing"].replace("unknown", "cannot tell"),
            "seeds": lambda each: f"{each['seeds_ahead']} of {each['seeds']} for the model",
        }  # fmt: skip
        lines = rivals.assign(method=rivals["variant"])
        caption += " ★: the best, chosen on these data, which favors it."
        yield "Beside training-free methods in the same bytes", caption, texts_of(lines, columns)
    if len(findings.speeds):
        yield "Speed and memory", "Medians; contestants of one batch size took turns.", speed_table(findings.speeds)
    caption = "Start the same command again: finished cells are not repeated, failed ones are."
    failed: Columns = {name: (name, "") for name in ("method", "task", "error", "source")}
    yield "Failed cells", caption, texts_of(findings.failures, {**failed, "budget": ("asked", "")})


def _kinds(texts: pandas.DataFrame) -> list[str]:
    """Return which columns sort as numbers: all their texts begin with one."""
    return ["number" if texts[name].str.match(r"[+-]?\d|-?$").all() else "" for name in texts]


def _contents(findings: Findings) -> str:
    """Describe the page's contents by number."""
    analyses = findings.places[findings.places["task"].str.startswith("inside")]["key"].unique()
    kinds = (
        *((findings.summary, "result"), (findings.speeds, "speed measurement"), (findings.failures, "failed cell")),
        (analyses, "inside view"),
    )
    return ", ".join(f"{len(rows)} {word}{'s' if len(rows) > 1 else ''}" for rows, word in kinds if len(rows))
