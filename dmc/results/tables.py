"""Tables of a store's results: texts in pandas frames, written as Markdown and CSV, or shown by the page."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas

from dmc.results.equal_bytes import SAME_BYTES, asked_of, bytes_budget
from dmc.results.fronts import fronts_of
from dmc.results.measurement import DONE, NOT_FINITE, Row, to_frame
from dmc.results.statistics import MARGIN, beside_baselines, pareto_front, summarize
from dmc.results.store import Store, read_rows, replace_file
from dmc.results.verdict import Scale, carried, verdicts_of

TABLE, CSV, MEASUREMENTS = "table.md", "results.csv", "measurements.csv"
LEAST_RATIO = 0.9
"""Share of the requested ratio from which a target counts as met."""
LEGEND = (
    "±: standard error over texts (contexts, files) and seeds; of a difference, paired by sample. Verdicts hold with "
    "95 % confidence. Worse (✗): the loss against the full cache is above 0. As good (✓): it is at most "
    f"{MARGIN:g}, in nats per token or as a share of the answers; of metrics above 1, that share of the metric. Else "
    "the margin that the samples carry is named: so far the loss may be from what they show, either way. CR and bytes "
    "are averages over all predicted positions. Bytes are all that is allocated: whole pages, of which the last is "
    f"partly empty, and tables. ↓: less than {LEAST_RATIO:.0%} of the requested CR. ≠: more than "
    f"{SAME_BYTES - 1:.0%} away from the bytes requested. ★: no other row is both smaller and better."
)
SOLVED = 0.5
"""Share of the answers that a full cache gives of a task that tells methods apart."""
AGAINST = "against"
"""Beginning of the titles of comparisons."""
SPEEDS = ("batch length", "memory")
"""Coordinates of a speed benchmark's measurements: a batch size, and the memory of the largest batch."""
Columns = Mapping[str, "tuple[str, str] | Callable[[Any], str]"]
"""Columns by title: the column of a frame and its format, or a function from a line to its text."""


def meets_ratio(achieved: float, requested: float) -> bool:
    """Return whether a cache is compressed as much as was asked for, or claimed."""
    return achieved >= LEAST_RATIO * requested


def texts_of(lines: pandas.DataFrame, columns: Columns) -> pandas.DataFrame:
    """Format lines of a frame as texts, indexed by method; columns without any text are left out."""
    found = {}
    for title, how in columns.items():
        if callable(how):
            found[title] = [how(line) for _, line in lines.iterrows()]
        else:
            values = lines[how[0]] if how[0] in lines else [None] * len(lines)
            found[title] = ["" if pandas.isna(value) else format(value, how[1]) for value in values]
    texts = pandas.DataFrame(found, dtype=object)
    texts.index = pandas.Index(lines["method"].astype(str) if len(lines) else [], dtype=object)
    return texts.loc[:, (texts != "").any()]


def markdown(texts: pandas.DataFrame) -> str:
    """Write texts as a Markdown table."""
    head, *lines = [f"| {' | '.join(cells)} |" for cells in [texts.columns, *texts.to_numpy()]]
    return "\n".join([head, "|---" * len(texts.columns) + "|", *lines])


def write_tables(
    store: Store,
    folder: Path,
    reference: str | None = None,
    *,
    metrics: Sequence[str] | None = None,
    keys: Collection[str] | None = None,
) -> str:
    """Write `table.md`, `results.csv` (a line for each method, budget and task) and `measurements.csv`.

    The verdict stands at the end, where a terminal stops.

    Args:
        store: the results.
        folder: output folder; each file is replaced atomically.
        reference: stock model whose full cache compressed ones are compared with; None: see `summarize`.
        metrics: metrics with tables; None: each task's main one.
        keys: keys of the cells to show; None: all.
    Returns:
        The tables and the verdict.
    """
    rows = read_rows([store], keys)
    frame = to_frame(row for row in rows if row["status"] == DONE)
    summary = summarize(frame, reference, metrics)
    fronts, beside = fronts_of(frame), beside_baselines(frame, reference, metrics)
    sentences = [*verdicts_of(summary, beside)]
    sentences += [sentence for front in fronts for sentence in front.sentences()]
    tables = [
        *format_tables(frame, reference, metrics, summary, beside),
        *(markdown(front.table()) for front in fronts),
    ]
    tables += problems_of(rows)
    table = "\n\n".join([*tables, *(["### Verdict"] if sentences else []), *sentences])
    replace_file(folder / TABLE, f"{table}\n".encode())
    replace_file(folder / CSV, summary.to_csv(index=False).encode())
    content = (
        frame.drop(columns=["samples", "contexts", "members", "folder"]).dropna(axis=1, how="all").to_csv(index=False)
    )
    replace_file(folder / MEASUREMENTS, content.encode())
    return table


def format_tables(
    frame: pandas.DataFrame,
    reference: str | None = None,
    metrics: Sequence[str] | None = None,
    summary: pandas.DataFrame | None = None,
    beside: pandas.DataFrame | None = None,
) -> list[str]:
    """Format a table for each task and metric, the best first within each budget, one of all tasks, one of speeds."""
    summary = summarize(frame, reference, metrics) if summary is None else summary
    beside = beside_baselines(frame, reference, metrics) if beside is None else beside
    speeds = speed_table(speeds_of(frame))
    parts = [markdown(speeds)] if len(speeds) else []
    if summary.empty:
        return parts
    # NAME:known and NAME:hidden, with a label behind them or none, are two columns of one table
    summary = summary.assign(shown=summary["task"].str.replace(r":(known|hidden)(?= \(|$)", "", regex=True))
    groups = summary.sort_values(["shown", "metric"], kind="stable").groupby(["shown", "metric"], sort=False)
    parts += [_task_table(group, beside) for _, group in groups]
    if summary["shown"].nunique() > 1 and metrics is None:
        parts.append("### All tasks\n\n" + markdown(all_tasks(summary)))
    return [*parts, LEGEND]


def _task_table(group: pandas.DataFrame, beside: pandas.DataFrame) -> str:
    """Format the lines of one task and metric, with known and hidden questions as adjacent columns."""
    first, tokens = group.iloc[0], group["asked"].str.extract(r"^(\d+) tokens$")[0].astype(float)
    asked = group["question"].nunique() > 1
    split = f" of the {first['split']} split" if first["split"] else ""
    question = f", question {first['question']}" if first["question"] and not asked else ""
    of = f" of {first['samples']} samples" if first["samples"] else ""
    if 0 < first["contexts"] < first["samples"]:
        of += f" of {first['contexts']} contexts"
    better = "higher" if first["higher_is_better"] else "lower"
    title = f"### {first['shown']}: {first['metric']}{of}{split} ({better} is better){question}{unsolved(group)}\n\n"
    ratio = group.groupby("asked")["requested_ratio"].transform("median")  # ratios differ within a budget in bytes
    order = group.assign(fixed=tokens.notna(), place=ratio.where(tokens.isna(), -tokens))
    order["worse"] = group["value"] * (-1.0 if first["higher_is_better"] else 1.0)
    order = order.sort_values(["fixed", "place", "worse"], kind="stable")
    hidden = ["task", "question", "metric", "of full", "samples", "contexts"]
    texts = result_table(order, beside).drop(columns=hidden, errors="ignore")
    metric = str(first["metric"])
    texts = texts.rename(columns={"value": metric})
    if not asked:
        return title + markdown(texts)
    parts = []
    for question in dict.fromkeys(group["question"]):
        columns = [name for name in texts if name in (metric, "verdict", "front") or name.startswith(AGAINST)]
        names = {name: f"{name}, {question}" for name in columns}
        side = texts[(order["question"] == question).to_numpy()].rename(columns=names)
        parts.append(side.set_index(["method", "requested"]))
    both = pandas.concat(parts, axis=1)
    return title + markdown(both.loc[:, ~both.columns.duplicated()].fillna("").reset_index())


def unsolved(lines: pandas.DataFrame) -> str:
    """Say of a task, given by its lines, that no full cache gives half of the answers; else nothing."""
    full = lines[lines["is_full"] & lines["higher_is_better"].astype(bool)]
    if full.empty or full["value"].max() >= SOLVED:
        return ""
    return f"; the full cache solves less than {SOLVED:g}, so that it says little about compression"


def result_table(summary: pandas.DataFrame, beside: pandas.DataFrame) -> pandas.DataFrame:
    """Format all columns of a summary, with the best training-free method in a compressed model's bytes."""
    known = summary[summary["bytes_per_token"].notna()]
    on_front = {label for _, lines in known.groupby(["task", "metric"]) for label in pareto_front(lines)}
    best = beside[beside["is_best"]].groupby(["variant", "task", "metric"]).last()
    references = summary["against"].dropna().unique()
    scales = {where: Scale.of(lines) for where, lines in summary.groupby(["task", "metric"])}

    def verdict(line: pandas.Series) -> str:
        is_open = line["standing"] == "unknown"
        text = carried(line, scales[line["task"], line["metric"]]) if is_open else line["standing"]
        return text and text + _of_seeds(line["seeds_worse"], line["seeds"], "worse")

    def against(line: pandas.Series) -> str:
        if pandas.isna(line["lost"]):
            return "-"
        named = f" ({line['against']})" if len(references) > 1 else ""
        return plus((-1.0 if line["higher_is_better"] else 1.0) * line["lost"], line["lost_error"]) + named

    def beside_best(line: pandas.Series) -> str:
        where = (line["variant"], line["task"], line["metric"])
        if where not in best.index or not line["learned"] or not pandas.isna(line["budget"]):
            return ""
        found = best.loc[where]
        more = f" in {found['baseline_bytes'] - 1:.0%} more bytes" if found["baseline_bytes"] > SAME_BYTES else ""
        ahead = "worse than" if found["gap"] < 0 else "better than" if found["gap"] > 0 else "from"
        text = f"{plus(abs(found['gap']), found['gap_error'], '.4f')} {ahead} {found['baseline']}{more}"
        text += "" if found["gap_lower"] > 0 or found["gap_upper"] < 0 else ", not significant"
        return text + _of_seeds(found["seeds_ahead"], found["seeds"], "better")

    def size(line: pandas.Series) -> str:
        over = line["bytes_per_token"] / line["requested_bytes_per_token"]
        is_missed = over < 1 / SAME_BYTES or over > SAME_BYTES
        return plus(line["bytes_per_token"], None, ",.0f") + (f" ≠ {over - 1:+.1%}" if is_missed else "")

    def ratio(line: pandas.Series) -> str:
        held = max(line["achieved_ratio"], line["end_ratio"])
        is_held_asked = bytes_budget(line["budget"]) is None and line["target_counts"] != "decided"
        is_missed = is_held_asked and not meets_ratio(held, line["requested_ratio"])
        return f"{line['achieved_ratio']:.2f}" + (" ↓" if is_missed else "")

    columns: Columns = {
        "method": ("method", ""), "requested": ("asked", ""), "task": ("task", ""), "question": ("question", ""),
        "metric": lambda line: f"{line['metric']}\u00a0{'↑' if line['higher_is_better'] else '↓'}",
        "achieved CR": ratio,
        "value": ("value", ".4f"),
        f"{AGAINST} {references[0] if len(references) == 1 else 'its full cache'}": against,
        "verdict": verdict,
        "front": lambda line: "★" if line.name in on_front else "",
        "CR at the end": ("end_ratio", ".2f"),
        "cache bytes/token": size, "of full": ("share", ".0%"),
        "peak cache bytes": ("peak_bytes", ",.0f"),
        f"{AGAINST} the best training-free method at equal bytes": beside_best,
        "samples": ("samples", "d"), "contexts": ("contexts", "d"), "source": ("source", "d"),
    }  # fmt: skip
    return texts_of(summary, columns)


def plus(value: float, error: Any, form: str = "+.4f") -> str:
    """Format a number with its standard error, if that is known."""
    if pandas.isna(value):
        return ""
    return format(value + 0.0, form) + ("" if pandas.isna(error) else f" ± {format(error, form.lstrip('+'))}")


def _of_seeds(some: float, seeds: float, words: str) -> str:
    return f", {some:.0f} of {seeds:.0f} seeds {words}" if seeds > 1 else ""


def all_tasks(summary: pandas.DataFrame) -> pandas.DataFrame:
    """Format the tasks side by side: ✓ as good as the full cache, ✗ worse."""
    marks = {"as good": " ✓", "worse": " ✗"}
    texts = [
        plus(line["value"], line["value_error"], ".4f") + marks.get(line["standing"], "")
        for _, line in summary.iterrows()
    ]
    shown = summary.assign(text=texts, column=summary["task"] + " (" + summary["metric"] + ")")
    wide = shown.groupby(["method", "asked", "column"], sort=False)["text"].last().unstack().fillna("")
    wide = wide[[*dict.fromkeys(shown["column"])]].reset_index()
    return texts_of(wide, {name.replace("asked", "requested"): (name, "") for name in wide})


def speeds_of(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Make one line of each row of a speed benchmark, its metrics as columns, and `gain` over the baseline.

    The baseline is `generate()` of transformers among those that decoded in turns, else the first of them.
    """
    of_speed = frame[frame["by"].isin(SPEEDS)]
    if of_speed.empty:
        return of_speed.drop(columns="method").assign(method=None)
    metrics = of_speed.pivot(index="key", columns="metric", values="value")
    lines = of_speed.drop_duplicates("key").drop(columns=["metric", "value", "method"]).join(metrics, on="key")
    lines = lines.assign(method=lines["policy"], gain=float("nan"))
    if "tokens_per_second" in lines:
        lines["turns"] = lines["turns"].fillna(lines["model"])  # of an earlier version
        alike = ["turns", "task", "task_key", "length", "batch", "folder"]
        for _, same in lines.groupby(alike, sort=False, dropna=False):
            plain = same[~same["policy"].str.startswith("engine")]
            yardstick = (plain if len(plain) else same)["tokens_per_second"].iloc[0]
            lines.loc[same.index, "gain"] = same["tokens_per_second"] / yardstick
        lines["milliseconds"] = 1e3 * lines["token_seconds"]
    return lines.reset_index(drop=True)


def speed_table(speeds: pandas.DataFrame) -> pandas.DataFrame:
    """Format lines of `speeds_of`."""
    columns: Columns = {
        "decoder": ("policy", ""),
        "model": lambda line: line["model"] if speeds["model"].nunique() > 1 else "",
        "setting": lambda line: line["task"] if speeds["task"].nunique() > 1 else "",
        "prompt tokens": ("length", ",.0f"), "batch": ("batch", ".0f"), "achieved CR": ("achieved_ratio", ".2f"),
        "first token (s)": ("first_token_seconds", ".2f"), "ms/token": ("milliseconds", ".1f"),
        "tokens/s": ("tokens_per_second", ",.1f"), "gain": ("gain", ".2f"), "cache bytes": ("peak_bytes", ",.0f"),
        "memory for pages": ("memory", ",.0f"), "largest batch": ("largest_batch", ".0f"), "source": ("source", "d"),
    }  # fmt: skip
    return texts_of(speeds, columns)


def problems_of(rows: Sequence[Row]) -> list[str]:
    """Describe rows without usable metrics, with the reasons, and truncated prompts."""
    problems = []
    for row in rows:
        budget = [] if row["budget"] is None else [asked_of(row | {"is_full": False})]
        cell = ", ".join([row["method"], *budget, row["task"]])
        if row["status"] == NOT_FINITE:
            reason = ", ".join(f"{name} is {row['metrics'][name]}" for name in row.get("not_finite") or row["metrics"])
            problems.append(f"not finite, in no table or plot: {cell}: {reason}")
        elif row["status"] != DONE:
            problems.append(f"failed: {cell}: {row.get('error', 'unknown')}")
        elif row.get("prompts_cut"):
            problems.append(f"{cell}: {row['prompts_cut']} prompts exceeded the context and lost their beginning")
    return problems
