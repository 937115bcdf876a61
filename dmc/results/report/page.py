"""The page: verdict, plots, tables and where they come from in one HTML file, and the same as PNG, CSV and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pandas
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from tqdm import tqdm

from dmc.results import plots
from dmc.results.report.reading import Findings
from dmc.results.statistics import MARGIN, RATIO_TOLERANCE, meets_target, pareto_front
from dmc.results.tables import replace_file

TITLE = "KV-cache compression: what it keeps, what it costs"
PAGE, CSV, JSON, PLOTS = "report.html", "results.csv", "report.json", "plots"
QUALITY, COSTS = "Quality against memory", "Budgets held, and speed"
CURVES, GRIDS, HEADS = "By position, turn or length", "Answers by length and depth", "Compression of layers and heads"
INSIDE = "What gates merge and policies leave"
SAME = 1.01
"""Where the ratios of heads differ by less, relatively, there is no heatmap."""
CAVEAT = (
    "±: standard error, of differences paired by sample, over contexts (files, texts) and seeds. Worse and as good "
    f"hold with 95 % confidence each; as good loses at most {MARGIN:g} (nats per token, or of the answers; above 1 "
    "that share). Of many comparisons some mislead. CR and bytes/token are means over all positions predicted."
)


def write_page(findings: Findings, folder: Path, title: str = TITLE) -> Path:
    """Write `report.html`, `plots/*.png`, `results.csv` and `report.json`; earlier ones are replaced.

    Args:
        findings: what to show.
        folder: where to; made if need be.
        title: of the page.
    Returns:
        The page's path.
    """
    verdict, sections = judge(findings), dict[str, list[dict[str, Any]]]()
    (folder / PLOTS).mkdir(parents=True, exist_ok=True)
    for name in _plots_of(folder / JSON):
        (folder / PLOTS / name).unlink(missing_ok=True)
    for number, (section, plot) in enumerate(tqdm(_draw_all(findings), "plots", disable=None), start=1):
        slug = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in plot.title.lower())
        path = plot.write(folder / PLOTS / f"{number:02d}-{'-'.join(filter(None, slug.split('-')))[:60]}.png")
        drawn = {"title": plot.title, "caption": plot.caption, "file": path.name, "svg": Markup(plot.svg(number))}
        sections.setdefault(section, []).append(drawn)
    environment = Environment(
        loader=PackageLoader("dmc.results.report", "."), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    page = environment.get_template("page.html").render(
        title=title,
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        verdict=verdict,
        sections=sections,
        tables=[table for table in _tables(findings) if table.rows],
        contents=_contents(findings),
        findings=findings,
    )
    summary = findings.summary.drop(columns=["keys"], errors="ignore")
    data = {
        **{"verdict": verdict, "notes": findings.notes, "sources": findings.sources},
        **{name: _records(getattr(findings, name)) for name in ("rivals", "ranks", "places", "speeds", "failures")},
        **{"results": _records(summary), "plots": [each["file"] for drawn in sections.values() for each in drawn]},
        "analyses": [
            {**each, "tables": [*each["tables"]], "ratios": each["ratios"].to_numpy().tolist()}
            for each in findings.analyses
        ],
    }
    replace_file(folder / CSV, summary.to_csv(index=False, lineterminator="\n").encode())
    replace_file(folder / JSON, json.dumps(data, indent=1, default=str).encode())
    replace_file(folder / PAGE, page.encode())
    return folder / PAGE


def _records(frame: pandas.DataFrame) -> Any:
    unshown = (
        ("samples", "contexts", "settings", "provenance", "keys") if "coordinates" in frame or "by" in frame else ()
    )
    return json.loads(
        frame.drop(columns=[*unshown], errors="ignore").dropna(axis=1, how="all").to_json(orient="records")
    )


def _plots_of(data: Path) -> list[str]:
    """Name the plots of the page before, by its own list: other pictures in their folder are somebody's."""
    try:
        names = json.loads(data.read_text())["plots"]
        return [Path(name).name for name in names if name.endswith(".png")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _draw_all(findings: Findings) -> Iterator[tuple[str, plots.Plot]]:
    """Draw whatever there is, with the section it belongs to."""
    summary, places, speeds = findings.summary, findings.places, findings.speeds
    if len(summary):
        for _, lines in summary.groupby("task", sort=False):
            yield QUALITY, plots.draw_quality([lines])
            yield QUALITY, plots.draw_quality([lines], "achieved_ratio")
        if not summary["is_full"].all():
            yield COSTS, plots.draw_ratios(summary)
    if len(speeds):
        for source, rows in speeds[speeds["memory"].isna()].groupby("source"):
            yield COSTS, plots.draw_speed(rows, f" (source {source})")
    if "decode_tokens_per_second" in summary and summary["decode_tokens_per_second"].notna().any():
        yield COSTS, plots.draw_decoding(summary)
    if len(places):
        yield from _draw_places(places, findings)
    for each in findings.analyses:
        for kind, table in each["tables"].items():
            yield INSIDE, plots.draw_analysis(kind, table, each["name"])


def _draw_places(places: pandas.DataFrame, findings: Findings) -> Iterator[tuple[str, plots.Plot]]:
    even: list[str] = []
    for (task, by), lines in places.groupby(["task", "by"], sort=False):
        names = str(by).split()
        if len(names) == 1 and lines[names[0]].nunique() > 1:
            yield CURVES, plots.draw_curves(lines)
        if len(names) != 2:
            continue
        sheet, (across, down) = [], names if by != "layer head" else reversed(names)
        for (name, title), own in lines.groupby(["name", "label"], sort=False):
            values = own.groupby([down, across])["value"].mean().unstack()
            if by == "layer head" and values.max(axis=None) < SAME * values.min(axis=None):
                even += [] if own["is_full"].iloc[0] else [name]
            elif by != "layer head" or not own["is_full"].iloc[0]:
                sheet.append(plots.Heatmap(name, own["method"].iloc[0], title, values))
        if sheet and by == "layer head":
            words = f"{task}: CR of layers and heads", plots.HEADS
            yield from ((HEADS, plot) for plot in plots.draw_heatmaps(*words, sheet, logarithmic=True))
        elif sheet:
            caption = f"Light is all answered, dark none. Across: {across}. Down: {down}."
            yield from ((GRIDS, plot) for plot in plots.draw_heatmaps(f"{task} by {across} and {down}", caption, sheet))
    if even:
        findings.notes.append(f"no heatmap, for every head has the same CR: {', '.join(dict.fromkeys(even))}")


def judge(findings: Findings) -> dict[str, Any]:
    """Say what `dmc.results.statistics` states: a headline, points (subject, words) and caveats."""
    headline, points = "There are failed cells only: see their errors below.", list[tuple[str, str]]()
    speeds, inside = list(_judge_speeds(findings.speeds)), [(each["name"], _inside(each)) for each in findings.analyses]
    if len(findings.summary):
        headline = _headline(findings.summary)
        points += _judge_tasks(findings.summary) + _judge_rivals(findings.rivals) + _judge_ranks(findings)
    elif speeds:
        headline = speeds.pop(0)[1]
    elif inside:
        headline = ": ".join(inside.pop(0))
    caveats = [f"Failed cells: {len(findings.failures)}, see below."] if len(findings.failures) else []
    caveats += [CAVEAT] if len(findings.summary) else []
    if len(findings.summary) and findings.summary["own_gates"].any():
        caveats.append("A model with gates of its own has other weights than the full cache it is compared with.")
    return {"headline": headline, "points": points + speeds + inside, "caveats": caveats}


def _headline(summary: pandas.DataFrame) -> str:
    """Name the smallest cache that is as good as the full one on every task that tells methods apart."""
    silent = [task for task, lines in summary.groupby("task", sort=False) if not lines["tells"].any()]
    told = summary[~summary["task"].isin(silent)]
    count, ends = (
        told["task"].nunique(),
        f" Left out, for they tell nothing apart: {', '.join(silent)}." if silent else "",
    )
    if not count:
        return (
            f"No task tells methods apart: all have one figure, or the full cache hardly answers ({', '.join(silent)})."
        )
    if "standing" not in told or told["lost"].isna().all():
        return f"Without a full cache on the same samples nothing says what compression costs.{ends}"
    on = f"all {count} tasks" if count > 1 else told["task"].iloc[0]
    good = told[(told["standing"] == "as good") & (told["share"] < 1)].groupby("label")["share"].agg(["mean", "count"])
    good = good[good["count"] == count]["mean"]
    if good.empty:
        return f"No smaller cache is shown to be as good as the full one on {on}.{ends}"
    return (
        f"{good.idxmin()} is the smallest cache shown to be as good as the full one on {on}: "
        f"{good.min():.0%} of its bytes.{ends}"
    )


def _judge_tasks(summary: pandas.DataFrame) -> list[tuple[str, str]]:
    points = []
    for task, lines in summary.groupby("task", sort=False):
        smaller = lines[lines.get("share", 1.0) < 1]
        if smaller.empty:
            continue
        counts = smaller["standing"].value_counts()
        good = smaller[smaller["standing"] == "as good"]
        best = good.loc[good["share"].idxmin()] if len(good) else smaller.loc[smaller["lost"].idxmin()]
        points.append(
            (
                str(task),
                f"Of {len(smaller)} smaller caches {counts.get('as good', 0)} are as good as the full one, "
                f"{counts.get('worse', 0)} worse; of {counts.get('unknown', 0)} the samples cannot tell. "
                f"{'Smallest as good' if len(good) else 'Closest'}: {plots.describe(best)} ({best['share']:.0%} of the "
                f"full cache's), worse by {_plus(best['lost'], best['lost_error'])}"
                f"{_seeds(best, 'seeds_worse', 'worse')}.",
            )
        )
    return points


def _judge_rivals(rivals: pandas.DataFrame) -> list[tuple[str, str]]:
    best = rivals[rivals["is_best"]].drop_duplicates(["variant", "task"]) if len(rivals) else rivals
    return [
        (
            f"{each['variant']} on {each['task']}",
            f"{each['rival']} is the best training-free method in its bytes: "
            f"{'behind' if each['gap'] > 0 else 'ahead of'} the model by "
            f"{_plus(abs(each['gap']), each['gap_error'], '.3g')}{_seeds(each, 'seeds_ahead', 'for the model')}.",
        )
        for _, each in best.iterrows()
    ]


def _judge_ranks(findings: Findings) -> list[tuple[str, str]]:
    ranks, points = findings.ranks, []
    if len(ranks):
        telling = set(findings.summary["task"][findings.summary["tells"].astype(bool)])
        for share, lines in ranks[ranks["task"].isin(telling)].groupby("share", sort=False):
            if lines["policy"].nunique() > 1:
                wins = lines[lines["tied"]]["policy"].value_counts()
                told = ", ".join(f"{policy} ({count})" for policy, count in wins.items())
                of = lines.groupby(["model", "task"]).ngroups
                words = f"Best of the training-free, or not shown to be worse, on how many of {of} tasks: {told}."
                points.append((f"At {share:.1%} of the full cache's bytes", words))
    return points


def _judge_speeds(speeds: pandas.DataFrame) -> Iterator[tuple[str, str]]:
    """Name the fastest contestant of every benchmark at its largest batch."""
    for source, rows in speeds[speeds["memory"].isna()].groupby("source") if len(speeds) else []:
        rows = rows[rows["batch_size"] == rows["batch_size"].max()]
        plain = rows[~rows["name"].str.startswith("engine")]
        best, other = rows.loc[rows["tokens_per_second"].idxmax()], (plain if len(plain) else rows).iloc[0]
        gain, share = (best[name] / other[name] for name in ("tokens_per_second", "bytes_allocated"))
        beside = (
            f", {gain:.2f} times {other['name']}, with {share:.0%} of its cache bytes"
            if best["name"] != other["name"]
            else ""
        )
        text = f"{best['name']} is the fastest of {len(rows)}: {best['tokens_per_second']:,.0f} tokens/s{beside}."
        text += f" Prompts of {best['prompt_length']:,.0f} tokens, source {source}."
        yield f"Speed, batch {best['batch_size']:.0f}", text


def _inside(analysis: dict[str, Any]) -> str:
    """Say what gates merge, or a policy leaves, and how unevenly."""
    ratios = analysis["ratios"]
    text, layers = f"CR {1 / (1 / ratios).mean(axis=None):.2f} {analysis['text']}", 1 / (1 / ratios).mean(axis=1)
    if ratios.max(axis=None) >= SAME * ratios.min(axis=None):
        text += f", heads from {ratios.min(axis=None):.2f} to {ratios.max(axis=None):.2f}, "
        text += f"layers from {layers.min():.2f} to {layers.max():.2f}"
    if (cut := analysis["tables"].get("segment_lengths")) is not None:
        mean = (cut["tokens"] * cut["all"]).sum() / max(1, cut["all"].sum())
        text += f"; {mean:.2f} tokens share an entry on average, {cut['tokens'].max():.0f} at most"
    return f"{text}."


def _plus(value: float, error: Any, form: str = "+.3g") -> str:
    return "" if pandas.isna(value) else format(value, form) + ("" if pandas.isna(error) else f" ± {error:.2g}")


def _seeds(line: Any, column: str, words: str) -> str:
    seeds = line.get("seeds", 1)
    return (
        f", {words} in {line[column]:.0f} of {seeds:.0f} seeds" if seeds > 1 and not pandas.isna(line[column]) else ""
    )


@dataclass(frozen=True)
class Table:
    """Rows under column titles."""

    title: str
    caption: str
    columns: list[tuple[str, bool]]
    """Titles, and whether they hold numbers."""
    rows: list[tuple[str, list[tuple[str, Any]]]]
    """The method, by which the page lights a row up, and its cells: texts, and the numbers by which they are sorted."""


Columns = dict[str, tuple[str, str | Callable[[Any], str]]]
"""Title: the column of a frame, and how it is written: a format, or what makes a text of the line."""


def _table(title: str, caption: str, lines: pandas.DataFrame, columns: Columns) -> Table:
    """Write lines; a column that is empty in all of them is left out."""
    cells: dict[str, list[tuple[str, Any]]] = {}
    for name, (column, form) in columns.items():
        values = lines[column] if column in lines else pandas.Series(None, lines.index, dtype=object)
        is_number = pandas.api.types.is_numeric_dtype(values)
        texts = [
            form(line) if callable(form) else "" if pandas.isna(value) else format(value, form if is_number else "")
            for value, (_, line) in zip(values, lines.iterrows(), strict=True)
        ]
        if any(texts):
            numbers = [None if pandas.isna(value) or not is_number else float(value) for value in values]
            cells[name] = list(zip(texts, numbers, strict=True))
    titles = [(name, any(number is not None for _, number in own)) for name, own in cells.items()]
    methods = map(str, lines["method"]) if len(lines) else []
    return Table(
        title,
        caption,
        titles,
        list(zip(methods, [list(row) for row in zip(*cells.values(), strict=True)], strict=False)),
    )


def _tables(findings: Findings) -> Iterator[Table]:
    summary = findings.summary
    if len(summary):
        yield _result_table(summary)
        if summary["task"].nunique() > 1:
            yield _task_table(summary)
    if len(findings.rivals):
        caption = (
            "What the training-free method loses more than the model in as many bytes: positive is for the model. ★: "
        )
        caption += "the best, chosen on these data, which favours it."
        columns: Columns = {
            "model": ("variant", ""), "task": ("task", ""), "metric": ("metric", ""),
            "training-free": ("rival", lambda each: each["rival"] + (" ★" if each["is_best"] else "")),
            "behind by": ("gap", lambda each: _plus(each["gap"], each["gap_error"], "+.4f")),
            "the model is": ("standing", ""),
            "seeds": ("seeds_ahead", lambda each: f"{each['seeds_ahead']} of {each['seeds']} for the model"),
        }  # fmt: skip
        lines = findings.rivals.assign(method=findings.rivals["variant"])
        yield _table("Beside training-free methods in the same bytes", caption, lines, columns)
    if len(findings.ranks):
        columns = {
            "of the full bytes": ("share", ".1%"), "model": ("model", ""), "task": ("task", ""),
            "method": ("policy", ""), "bytes/token": ("bytes_per_token", ",.0f"),
            "worse by": ("lost", lambda each: _plus(each["lost"], each["lost_error"], "+.4f")),
            "beside the full cache": ("standing", ""),
            "tied": ("tied", lambda each: "with the best" if each["tied"] else ""),
        }  # fmt: skip
        caption = "Budgets are interpolated in the logarithm of their bytes. Tied: the samples do not show it worse."
        lines = findings.ranks.assign(method=findings.ranks["model"] + ", " + findings.ranks["policy"])
        yield _table("Training-free methods in as many bytes", caption, lines, columns)
    if len(findings.speeds):
        yield _speed_table(findings.speeds)
    caption = "Start the same command again: finished cells are not repeated, failed ones are."
    failed: Columns = {
        name: (column, "")
        for name, column in (("method", "method"), ("budget", "asked"), ("task", "task"), ("error", "error"))
    }
    yield _table("Failed cells", caption, findings.failures, failed | {"source": ("source", "d")})


def _result_table(summary: pandas.DataFrame) -> Table:
    front = {label for _, lines in summary.groupby("task") for label in pareto_front(lines)}
    sign = summary["higher_is_better"].map({True: -1.0, False: 1.0})
    lost = summary["lost"].astype(float) if "lost" in summary else float("nan")
    lines = summary.assign(front=summary.index.isin(front), over=sign * lost, lost_error=summary.get("lost_error"))
    caption = (
        f"★: on the front of quality and bytes. ↓: below {RATIO_TOLERANCE:.0%} of the ratio asked for, also at the end."
    )
    columns: Columns = {
        "method": ("name", lambda each: each["name"] + (" ★" if each["front"] else "")),
        "budget": ("asked", ""), "task": ("task", ""), "question": ("question", ""),
        "metric": ("metric", lambda each: f"{each['metric']}\u00a0{'↑' if each['higher_is_better'] else '↓'}"),
        "quality": ("value", lambda each: _plus(each["value"], each.get("value_error"), ".4f")),
        "over full cache": ("over", lambda each: _plus(each["over"], each["lost_error"], "+.4f")),
        "beside it": ("standing", lambda each: _standing(each)),
        "requested CR": ("requested_ratio", ".2f"),
        "achieved CR": (
            "achieved_ratio", lambda each: f"{each['achieved_ratio']:.2f}{'' if meets_target(each) else ' ↓'}"
        ),
        "bytes/token": ("bytes_per_token", ",.0f"), "of full": ("share", ".0%"), "CR at the end": ("end_ratio", ".2f"),
        "peak bytes": ("peak_bytes", ",.0f"),
        "prefill tokens/s": ("prefill_tokens_per_second", ",.1f"),
        "decode tokens/s": ("decode_tokens_per_second", ",.1f"),
        "samples": ("samples", ",.0f"), "contexts": ("contexts", ",.0f"), "source": ("source", "d"),
    }  # fmt: skip
    return _table("All results", caption, lines, columns)


def _standing(line: Any) -> str:
    told = line.get("standing")
    return "" if pandas.isna(told) else f"{told}{_seeds(line, 'seeds_worse', 'worse')}"


def _task_table(summary: pandas.DataFrame) -> Table:
    """Put the tasks side by side, and so questions that were known and hidden while the cache was compressed."""
    marks = {"as good": " ✓", "worse": " ✗"}
    shown = summary.assign(
        text=[f"{each.value:.4g}{marks.get(getattr(each, 'standing', ''), '')}" for each in summary.itertuples()]
    )
    wide = shown.groupby(["method", "name", "asked", "task"], sort=False)["text"].last().unstack().reset_index()
    tasks = list(dict.fromkeys(shown["task"]))
    columns: Columns = {"method": ("name", ""), "budget": ("asked", ""), **{task: (task, "") for task in tasks}}
    return _table(
        "All tasks", "✓: as good as the full cache. ✗: worse. Neither: the samples cannot tell.", wide, columns
    )


def _speed_table(speeds: pandas.DataFrame) -> Table:
    largest = speeds["memory"].notna()
    name = speeds["name"].where(~largest, [f"engine CR {ratio:g}, largest batch" for ratio in speeds["ratio"]])
    size = speeds["bytes_allocated"].where(~largest, speeds["memory"])
    lines = speeds.assign(method=[each.partition(", largest")[0] for each in name], name=name, size=size)
    columns: Columns = {
        "contestant": ("name", ""), "prompt tokens": ("prompt_length", ",.0f"), "batch": ("batch_size", "d"),
        "achieved CR": ("achieved_ratio", ".2f"), "first token (s)": ("first_token_seconds", ".2f"),
        "ms/token": ("ms", ".1f"), "tokens/s": ("tokens_per_second", ",.1f"), "cache bytes": ("size", ",.0f"),
        "source": ("source", "d"),
    }  # fmt: skip
    lines["ms"] = 1e3 * lines["token_seconds"]
    return _table("Speed and memory", "Medians; contestants of one batch size took turns.", lines, columns)


def _contents(findings: Findings) -> str:
    """Count what the page shows."""
    speeds = findings.speeds[findings.speeds["memory"].isna()] if len(findings.speeds) else []
    kinds = ((findings.summary, "result"), (speeds, "speed measurement"), (findings.failures, "failed cell"))
    told = [f"{len(rows)} {word}{'s' if len(rows) > 1 else ''}" for rows, word in kinds if len(rows)]
    count = len(findings.analyses)
    return ", ".join(told + ([f"{count} analys{'es' if count > 1 else 'is'}"] if count else []))
