"""What a store holds as Markdown and CSV: one table function, for comparisons, benchmarks and studies alike."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Sequence
from pathlib import Path

import pandas

from dmc.results.row_names import told_apart
from dmc.results.statistics import MARGIN, beside_rivals, meets_target, summarize
from dmc.results.store import DONE, NOT_FINITE, Row, Store

TABLE, CSV, MEASUREMENTS = "table.md", "results.csv", "measurements.csv"
LEGEND = (
    "±: standard error of the difference, paired by sample, over contexts (files, texts) and seeds. **worse** and *as "
    f"good* hold with 95 % confidence each; as good loses at most {MARGIN:g} (nats per token, or of the answers; above "
    "1 that share); without either the samples cannot tell. CR and bytes are means over all positions predicted. ↓: "
    "less than 90 % of the ratio asked for."
)


def markdown(rows: Sequence[dict[str, str]]) -> str:
    """Write rows as a table; a column that is empty in all of them is left out."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if any(row.get(name) for row in rows)]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row.get(name, '') for name in names)} |" for row in rows)])


def write_tables(
    store: Store,
    folder: Path,
    reference: str | None = None,
    *,
    metrics: Sequence[str] | None = None,
    name: str = TABLE,
    keys: Collection[str] | None = None,
) -> str:
    """Write `table.md`, `results.csv` (a line for each method, budget and task) and `measurements.csv` (all figures).

    Args:
        store: what is shown.
        folder: where to; each file is replaced whole.
        reference: stock model with whose full cache compressed ones are compared; None: see `summarize`.
        metrics: which have tables; None: each task's main one.
        name: of the table.
        keys: of the cells that are shown; None: all.
    Returns:
        The table.
    """
    frame, rows = store.frame(keys), [row for row in store.rows() if keys is None or row["key"] in keys]
    summary = summarize(frame, reference, metrics)
    table = "\n\n".join([*format_tables(frame, reference, metrics), *untold(rows)])
    replace_file(folder / name, f"{table}\n".encode())
    replace_file(folder / CSV, summary.to_csv(index=False).encode())
    whole = frame.drop(columns=["samples", "contexts", "settings", "provenance", "members", "folder"])
    replace_file(folder / MEASUREMENTS, whole.to_csv(index=False).encode())
    return table


def format_tables(
    frame: pandas.DataFrame, reference: str | None = None, metrics: Sequence[str] | None = None
) -> list[str]:
    """Write a table for each task and metric, within each budget the best first, and one of all tasks."""
    summary, beside = summarize(frame, reference, metrics), beside_rivals(frame, reference, metrics)
    if summary.empty:
        return []
    summary["shown"] = summary["task"].str.partition(":")[0]  # NAME:known and NAME:hidden are two columns of one table
    parts = [
        _task_table(group, beside, metrics is not None)
        for _, group in summary.sort_values(["shown", "metric"], kind="stable").groupby(["shown", "metric"], sort=False)
    ]
    if summary["shown"].nunique() > 1 and metrics is None:
        rows = []
        for (method, asked), group in summary.groupby(["method", "asked"], sort=False):
            values = {f"{each['task']} ({each['metric']})": _value(each) for _, each in group.iterrows()}
            rows.append({"method": str(method), "requested": str(asked)} | values)
        parts.append("### All tasks\n\n" + markdown(rows))
    devices = summary["device"][summary["decode_tokens_per_second"].notna()]
    if devices.nunique() > 1:
        told = ", ".join(sorted(devices.unique()))
        parts.append(f"speeds were measured on several devices, which do not compare: {told}")
    return [*parts, LEGEND]


def _task_table(group: pandas.DataFrame, beside: pandas.DataFrame, tells_metric: bool) -> str:
    first = group.iloc[0]
    better = "higher" if first["higher_is_better"] else "lower"
    questions = [task.partition(":")[2] for task in dict.fromkeys(group["task"])]
    split = f" of the {first['split']} split" if first["split"] else ""
    question = f", question {first['question']}" if first["question"] and len(questions) == 1 else ""
    of = f"{first['samples']} samples"
    if 0 < first["contexts"] < first["samples"]:
        of += f" of {first['contexts']} contexts"
    title = f"### {first['shown']}: {first['metric']} of {of}{split} ({better} is better){question}\n\n"
    fixed = group["asked"].str.endswith("tokens")
    place = group["requested_ratio"].where(
        ~fixed, -group["asked"].str.partition(" ")[0].where(fixed, "0").astype(float)
    )
    worse = group["value"] * (-1.0 if first["higher_is_better"] else 1.0)
    ranked = group.assign(fixed=fixed, place=place, worse=worse).sort_values(["fixed", "place", "worse"], kind="stable")
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for _, each in ranked.iterrows():
        row = rows.setdefault((each["method"], each["asked"]), _method_columns(each))
        question = each["task"].partition(":")[2]
        column = f"{each['metric']}, {question}" if question else str(each["metric"])
        row |= {
            column: f"{each['value']:.4f}",
            f"over full cache{', ' if question else ''}{question}": _difference(each),
        }
        row |= {f"beside it{', ' if question else ''}{question}": _standing(each)} | _memory_columns(each)
        row |= _rival_columns(each, beside) if not question else {}
    return title + markdown(list(rows.values()))


def _method_columns(line: pandas.Series) -> dict[str, str]:
    achieved = f"{line['achieved_ratio']:.2f}" + ("" if meets_target(line) else " ↓")
    return {"method": str(line["method"]), "requested": str(line["asked"]), "achieved CR": achieved}


def _memory_columns(line: pandas.Series) -> dict[str, str]:
    def speed(phase: str) -> str:
        value = line[f"{phase}_tokens_per_second"]
        return "" if pandas.isna(value) else f"{value:,.0f}"

    peak = "" if pandas.isna(line["peak_bytes"]) else f"{int(line['peak_bytes']):,}"
    return {
        "cache bytes/token": f"{line['bytes_per_token']:,.0f}",
        "peak cache bytes": peak,
        "prefill tokens/s": speed("prefill"),
        "decode tokens/s": speed("decode"),
    }


def _rival_columns(line: pandas.Series, beside: pandas.DataFrame) -> dict[str, str]:
    """Say what the best training-free method loses in the bytes of a compressed model."""
    if beside.empty or not line["own_gates"] or line["budget"] is not None:
        return {}
    same = beside[(beside["variant"] == line["variant"]) & (beside["task"] == line["task"])]
    same = same[(same["metric"] == line["metric"]) & same["is_best"]]
    if same.empty:
        return {}
    best = same.iloc[0]
    sign = -1 if line["higher_is_better"] else 1
    error = "" if pandas.isna(best["gap_error"]) else f" ± {best['gap_error']:.4f}"
    seeds = f", in {best['seeds_ahead']} of {best['seeds']} seeds" if best["seeds"] > 1 else ""
    standing = {"worse": "**better than this**", "as good": "no better"}.get(best["standing"], "")
    told = ", ".join(filter(None, [f"{best['rival']} {sign * best['rival_lost']:+.4f}", standing]))
    return {"best training-free in its bytes": told, "it is behind by": f"{best['gap']:+.4f}{error}{seeds}"}


def _difference(line: pandas.Series) -> str:
    if pandas.isna(line["lost"]):
        return "-"
    error = "" if pandas.isna(line["lost_error"]) else f" ± {line['lost_error']:.4f}"
    return f"{(-1 if line['higher_is_better'] else 1) * line['lost']:+.4f}{error}"


def _standing(line: pandas.Series) -> str:
    told = {"worse": "**worse**", "as good": "*as good*"}.get(line["standing"], "")
    if line["seeds"] > 1 and not pandas.isna(line["lost"]):
        told = ", ".join(filter(None, [told, f"{int(line['seeds_worse'])} of {line['seeds']} seeds worse"]))
    return told


def _value(line: pandas.Series) -> str:
    error = "" if pandas.isna(line["value_error"]) else f" ± {line['value_error']:.4f}"
    return f"{line['value']:.4f}{error}"


def untold(rows: Sequence[Row]) -> list[str]:
    """Say which rows have no place among the figures, and why, and which prompts were cut."""
    notes = []
    for row in told_apart(rows):
        asked = [] if row["budget"] is None else [_asked(row)]
        where = ", ".join([row["method"], *asked, row["task"]])
        if row["status"] == NOT_FINITE:
            notes.append(f"not finite, left out of the figures: {where}: {reason(row)}")
        elif row["status"] != DONE:
            notes.append(f"failed: {where}: {reason(row)}")
        elif row.get("prompts_cut"):
            cut = "prompts were longer than the model's positions and lost their beginning"
            notes.append(f"{where}: {row['prompts_cut']} {cut}")
    return notes


def _asked(row: Row) -> str:
    budget = str(row["budget"])
    return budget.removeprefix("tokens:") + " tokens" if budget.startswith("tokens:") else f"CR {budget}"


def reason(row: Row) -> str:
    """Say why a row has no figures: its error, or the metrics that are infinite or no numbers."""
    if row["status"] == NOT_FINITE:
        return ", ".join(f"{name} is {row['metrics'][name]}" for name in row.get("not_finite") or row["metrics"])
    return str(row.get("error", "unknown"))


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole: jobs of a sweep write the same one.

    Raises:
        OSError: it cannot be written; an earlier one stays.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise type(error)(
            error.errno, f"{error.strerror or error}, the file could not be written", str(path)
        ) from error
