"""Read folders of compare.py, evaluate.py, benchmark.py, analyse.py and the quickstart into tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas

from dmc.results.measurement import COORDINATES
from dmc.results.plots import name_methods
from dmc.results.row_names import label_settings, told_apart
from dmc.results.statistics import MARGIN, Estimate, asked_of, beside_rivals, rank_at_bytes, summarize
from dmc.results.store import DONE, NOT_FINITE, Row, Store, read_frame
from dmc.results.tables import reason

EXPECTED = (
    "expected a folder written by compare.py or evaluate.py (cells.jsonl), benchmark.py (results.jsonl), analyse.py "
    "(analysis.json) or the quickstart (results.json with base, control and final)"
)
SHARES = (1 / 2, 1 / 4, 1 / 8)
"""Of the full cache's bytes, at which training-free methods are ranked."""
FAILURE = ["method", "asked", "task", "error", "source"]


@dataclass
class Findings:
    """Everything that a page shows."""

    summary: pandas.DataFrame = field(default_factory=pandas.DataFrame)
    """Of `statistics.summarize`, with `name` (the method as labels say it), `label` (with its budget) and `source`."""
    places: pandas.DataFrame = field(default_factory=pandas.DataFrame)
    """Measurements with coordinates: main metrics, and `compression_ratio` of heads; `name`, `label` as well."""
    rivals: pandas.DataFrame = field(default_factory=pandas.DataFrame)
    """Of `statistics.beside_rivals`."""
    ranks: pandas.DataFrame = field(default_factory=pandas.DataFrame)
    """Of `statistics.rank_at_bytes` at `SHARES`, in the column `share`."""
    speeds: pandas.DataFrame = field(default_factory=pandas.DataFrame)
    """Of `benchmark.Measurement`, and largest batches: those have `memory`."""
    failures: pandas.DataFrame = field(default_factory=lambda: pandas.DataFrame(columns=FAILURE))
    analyses: list[dict[str, Any]] = field(default_factory=list)
    """Of each `name`, `text` (how much was read), `tables` (its CSVs by name), `ratios` (CR of heads) and `source`."""
    notes: list[str] = field(default_factory=list)
    sources: list[dict[str, Any]] = field(default_factory=list)

    def add_source(self, folder: str, provenance: dict[str, Any], device: str = "") -> int:
        """Return the number of a command and its environment, a new one where it is new."""
        source = {"folder": folder, "command": provenance.get("command") or "unknown"}
        source |= {"commit": provenance.get("git_commit"), "versions": dict(provenance.get("versions") or {})}
        source["machine"] = ", ".join(filter(None, (device, provenance.get("machine"))))
        if source not in self.sources:
            self.sources.append(source)
        return self.sources.index(source) + 1


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
    findings, stores = Findings(), []
    for folder in dict.fromkeys(folders):
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder: {EXPECTED}")
        before, store = len(findings.sources), Store(folder / "cells.jsonl")
        with _telling(str(folder)):
            _read(folder, findings)
            stores += [store] if store.rows() else []
        if len(findings.sources) == before and store not in stores:
            raise ValueError(f"{folder} holds no results: {EXPECTED}")
        if store.num_damaged:
            findings.notes.append(f"{folder}: {store.num_damaged} damaged lines are left out")
    with _telling(", ".join(str(store.path.parent) for store in stores)):
        if stores:
            _add_cells(stores, findings, reference)
    return findings


@contextmanager
def _telling(folders: str) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{folders}: a row is not of this project ({error!r}): {EXPECTED}") from error


def _read(folder: Path, findings: Findings) -> None:
    """Add what a folder holds beside cells."""
    speeds, quickstart, analysis = (folder / name for name in ("results.jsonl", "results.json", "analysis.json"))
    if quickstart.is_file() and not (folder / "cells.jsonl").is_file():
        _add_quickstart(json.loads(quickstart.read_text()), folder, findings)
    if speeds.is_file():
        _add_speeds(speeds, findings)
    if analysis.is_file():
        _add_analysis(json.loads(analysis.read_text()), folder, findings)


def _add_cells(stores: Sequence[Store], findings: Findings, reference: str | None) -> None:
    rows = told_apart([row | {"folder": str(store.path.parent)} for store in stores for row in store.rows()])
    sources = {row["key"]: _source(row, findings) for row in rows}
    frame = read_frame(stores)
    frame = frame[~frame.duplicated(["key", "metric", "by", *COORDINATES], keep="last")]  # of a cell in two folders
    several = frame[~frame["own_gates"].astype(bool)]["variant"].nunique() > 1
    summary = name_methods(summarize(frame, reference), several)
    if len(summary):
        summary["source"] = [sources[keys[-1]] for keys in summary["keys"]]
    findings.summary = pandas.concat([findings.summary, summary], ignore_index=True)
    findings.rivals = beside_rivals(frame, reference)
    findings.ranks = pandas.concat([rank_at_bytes(frame, share, reference).assign(share=share) for share in SHARES])
    places = frame[(frame["by"] != "") & (frame["is_main"] | (frame["metric"] == "compression_ratio"))]
    if len(places):
        findings.places = name_methods(places.assign(asked=[asked_of(row) for _, row in places.iterrows()]), several)
    failed = [row for row in rows if row["status"] != DONE]
    findings.failures = pandas.DataFrame([_failure(row, sources[row["key"]]) for row in failed], columns=FAILURE)


def _source(row: Row, findings: Findings) -> int:
    return findings.add_source(row["folder"], row["provenance"], row.get("device", ""))


def _failure(row: Row, source: int) -> tuple[Any, ...]:
    error = f"not finite: {reason(row)}" if row["status"] == NOT_FINITE else reason(row)
    asked = asked_of(row | {"is_full": row["budget"] is None and not row["own_gates"]})
    return row["method"], asked, row["task"], error, source


def _add_speeds(path: Path, findings: Findings) -> None:
    """Add a benchmark's measurements and largest batches; of one command's, the newest count."""
    rows, damaged = [], 0
    for line in filter(None, map(str.strip, path.read_text(errors="replace").splitlines())):
        try:
            rows.append(json.loads(line))
        except ValueError:
            damaged += 1
    settings = [{name: value for name, value in row.get("settings", {}).items() if name != "output"} for row in rows]
    for row, own in zip(rows, settings, strict=True):  # a sweep's jobs have one command, and settings that differ
        same = [each for other, each in zip(rows, settings, strict=True) if other["command"] == row["command"]]
        row["label"] = label_settings(own, same) if own else ""
    for row in rows:
        command = f"{row['command']} ({row['label']})" if row["label"] else row["command"]
        row["source"] = findings.add_source(str(path.parent), row | {"command": command})
    table = pandas.DataFrame(rows).reindex(columns=SPEED)
    newest = table[~table.duplicated(["source", "name", "batch_size", "memory"], keep="last")]
    newest = newest[newest["memory"].isna() | ~newest.duplicated(["source", "name"], keep="last")]
    if newest[["name", "batch_size", "ratio"]].isna().any(axis=None):
        raise ValueError("a measurement lacks its name, batch_size or ratio")
    findings.speeds = pandas.concat([findings.speeds, newest], ignore_index=True)
    if len(newest) < len(table):
        told = f"{len(table) - len(newest)} earlier measurements of the same command are left out"
        findings.notes.append(f"{path.parent}: {told}")
    if damaged:
        findings.notes.append(f"{path.parent}: {damaged} damaged lines are left out")


SPEED = [
    *("name", "ratio", "achieved_ratio", "batch_size", "prompt_length", "first_token_seconds", "token_seconds"),
    *("tokens_per_second", "bytes_allocated", "memory", "source"),
]


def _add_analysis(record: dict[str, Any], folder: Path, findings: Findings) -> None:
    """Add one run of analyse.py; files of an earlier run in the same folder are left alone."""
    config = record["config"]
    names = [Path(name).stem for name in record["files"] if name.endswith(".csv")]
    tables = {name: pandas.read_csv(folder / f"{name}.csv").astype(float) for name in names}
    if "ratio_by_head" in tables:
        ratios = tables["ratio_by_head"].pivot(index="layer", columns="head", values="ratio")
    elif "entries_by_head" in tables:
        tokens = config["sequence_length"] + config["new_tokens"] - 1
        ratios = tokens / tables["entries_by_head"].pivot(index="layer", columns="head", values="entries")
    else:
        training = tables["ratio_over_training"]
        last = training[training["step"] == training["step"].iloc[-1]]
        ratios = last.pivot(index="layer", columns="head", values="ratio")
    name, read = record.get("name", folder.name), "at the end of the run"
    if config["model"] is not None:
        read = f"over {config['num_sequences']} x {config['sequence_length']:,} tokens"
    source = findings.add_source(str(folder), record["provenance"])
    findings.analyses.append({"name": name, "text": read, "tables": tables, "ratios": ratios, "source": source})


def _add_quickstart(results: dict[str, Any], folder: Path, findings: Findings) -> None:
    """Add the models of a quickstart, beside its control, and the CR of every head of its retrofit."""
    held, control = results["final"]["achieved_ratio"], results["control"]  # what training-free methods were given too
    free = results.get("training_free", {})
    rows = {"control": (1.0, control), "base": (1.0, results["base"])}
    rows |= {f"snapshot {ratio}": (float(ratio), row) for ratio, row in results["snapshots"].items()}
    rows |= {"retrofit": (held, results["final"])} | {name: (held, row) for name, row in free.items()}
    source = findings.add_source(str(folder), results)
    shared = {"task": "held-out text", "metric": "loss", "higher_is_better": False, "tells": True, "margin": MARGIN}
    shared |= {"samples": results.get("sequences"), "source": source, "value_error": None}
    lines = []
    for name, (asked, row) in rows.items():
        is_full, told = name in ("control", "base"), f"CR {asked:.3g}"
        over = Estimate(row["loss"] - control["loss"], row.get("over_control_error"))
        line = shared | {"name": name, "method": name, "label": name if is_full else f"{name} at {told}"}
        line |= {"asked": "full cache" if is_full else told, "is_full": is_full, "value": row["loss"]}
        line |= {"own_gates": not is_full and name not in free, "requested_ratio": asked}
        line |= {name: row[name] for name in ("achieved_ratio", "bytes_per_token")}
        line |= {"end_ratio": row.get("final_ratio", row["achieved_ratio"])}
        line |= {"share": row["bytes_per_token"] / control["bytes_per_token"]}
        if name != "control":
            line |= {"lost": over.value, "lost_error": over.error, "standing": over.standing(MARGIN)}
        lines.append(line)
    findings.summary = pandas.concat([findings.summary, pandas.DataFrame(lines)], ignore_index=True)
    history = folder / "retrofit/heatmaps/ratios.jsonl"
    if history.is_file():
        shares = json.loads(history.read_text().splitlines()[-1])
        ratios = 1 / pandas.DataFrame(shares["held"], dtype=float)
        table = ratios.stack().rename_axis(["layer", "head"]).rename("ratio").reset_index()
        found = {"name": f"retrofit, step {shares['step']}", "text": "over validation text", "ratios": ratios}
        findings.analyses.append(found | {"tables": {"ratio_by_head": table}, "source": source})
