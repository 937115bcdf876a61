"""A measurement, the result of every task, analysis and benchmark: one number, and everything that defines it.

All results take one path: a task runs in a cell (model x method x budget x task), the cell's row is written to the
one `Store` (`store.py`), `Store.frame` returns its `Measurement`s as one pandas table, `statistics.py` compares them,
and tables, plots and the page show only that. Speed benchmarks and exported models are no cells of a grid; they write
rows too, with `new_row`.

A frame has one line for each measurement and the fields of `Measurement` as columns. Coordinates are columns of their
own (`length`, `depth`, `turn`, `position`, `layer`, `head` ...; NaN where a measurement has none), and the column `by`
names those that a measurement has: "" for a metric of the whole task, "length depth", "position", "layer head".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypedDict

import numpy
import pandas

from dmc.files import flattened
from dmc.results.provenance import provenance

Row = dict[str, Any]
"""The store's content for one cell: its identity, memory, settings and metrics."""
DONE, FAILED, NOT_FINITE = "done", "failed", "not finite"
"""Status of a cell: it has metrics, an error, or metrics that are infinite or NaN."""
LOWER = ("loss", "perplexity", "bits_per_byte", "seconds", "peak_bytes", "bytes_read")
"""Suffixes of the names of metrics for which lower is better, beside a main metric for which higher is."""
COORDINATES = ("length", "depth", "turn", "position", "entries", "layer", "head", "batch", "memory")
"""Coordinate columns of every frame; others exist only with measurements that have them."""
FULL = "full"
"""Name of the policy that keeps everything, or leaves it to the model's learned gates."""


class Measurement(TypedDict):
    """One metric of one cell, over all its samples or those at one coordinate: a line of a frame."""

    key: str
    """Key of the row: model, policy, budget, task and seed."""
    method: str
    """Name of model and policy, unique for their settings."""
    model: str
    variant: str
    """Common name of models that differ in their seed; else the model's name."""
    named: str
    """The user's name of the model; `model` is made unique."""
    seed: int | None
    """Seed of the model within its variant."""
    learned: bool
    """Whether the model has learned gates."""
    policy: str
    budget: str | None
    """Budget as written in settings, "4" or "tokens:128"; None: the full cache or a model's learned gates."""
    turns: str | None
    """Digest of the decoders that took turns with this one; None: no benchmark of speed."""
    is_full: bool
    """Whether it is the full cache of a stock model, the reference."""
    requested_ratio: float
    """Requested compression ratio; for learned gates the one they were trained for."""
    target_counts: str | None
    """What the trained ratio of learned gates counts, see `CompressionConfig`; None: the entries that are held."""
    requested_bytes_per_token: float
    """Requested bytes; NaN: another kind of budget."""
    task: str
    benchmark: str | None
    """Benchmark that the task is, or is a part of; None: the task itself."""
    members: list[str]
    """Tasks of the benchmark, all of which its mean needs."""
    split: str | None
    """Split of the task's text."""
    question: str | None
    """Whether the question was `known` or `hidden` during compression; None: no question."""
    metric: str
    is_main: bool
    """Whether it is the task's main metric."""
    higher_is_better: bool
    value: float
    error: float
    """Standard error given by the task, where no samples are kept."""
    by: str
    """Names of its coordinates."""
    samples: list[float]
    """Values of the samples in order; empty: not kept."""
    contexts: list[Any]
    """Context of each sample, a file or a text: samples of one context are no independent evidence. Empty: each sample
    has its own."""
    samples_key: str | None
    """Hash of the samples: only measurements with equal ones are paired."""
    num_samples: int
    achieved_ratio: float
    """Tokens over entries, each summed over all predicted positions."""
    bytes_per_token: float
    """Allocated bytes, whole pages and all other state, over the same positions: the measure of equal memory."""
    end_ratio: float
    """Compression ratio at the last step of each sample, to which targets refer."""
    peak_bytes: float
    """Maximum bytes at any position of any sample."""
    mean_tokens: float
    """Mean tokens seen over positions and samples: the weight of a ratio."""
    entries_unread: int
    """Entries that were held and not read, summed over all steps."""
    reference: str | None
    """Model whose full cache a compressed one is compared with."""
    task_key: str
    """Settings of the task, the engine's and the seed: only rows with the same are compared."""


TYPES: dict[str, type] = {
    **dict.fromkeys(("learned", "is_full", "is_main", "higher_is_better"), bool),
    **dict.fromkeys(("value", "error", "requested_ratio", "achieved_ratio", "bytes_per_token", "mean_tokens"), float),
    **dict.fromkeys(("requested_bytes_per_token", "end_ratio", "peak_bytes"), float),
    "entries_unread": int,
    **dict.fromkeys(COORDINATES, float),
}


def key_of(model: str, policy: str, budget: str | None, task: str, seed: int) -> str:
    """Return the key of a cell of a grid: `base/h2o/4/text_loss/seed0`."""
    return "/".join([model, policy, *([] if budget is None else [budget]), task, f"seed{seed}"])


def settings_of_task(row: Row) -> dict[str, Any]:
    """Return all settings of a row but those of its model, policy and budget, and of others that it was beside."""
    settings, others = row.get("settings") or {}, ("model", "policy", "budget", "answers", "turns")
    return {name: value for name, value in settings.items() if name not in others}


def new_row(model: str, policy: str, task: str, settings: Mapping[str, Any], **figures: Any) -> Row:
    """Return a finished row for a result that is no cell of a grid.

    Args:
        model: its name.
        policy: name of the method, or of another implementation of the cache.
        task: name of the measurement.
        settings: `model`, `policy`, `task` and all else that defines it. They are part of the key: rows with the same
            names, settings and coordinates replace each other.
        figures: other fields of the row, such as `metrics`, `main_metric` (None: all metrics are main), their
            `coordinates`, and tables by coordinate, `by_layer_and_head={"layer": ..., "head": ..., "samples": 1,
            METRIC: nested}`.
    """
    place = flattened(settings) | (figures.get("coordinates") or {})
    defining = ",".join(f"{name}={value}" for name, value in place.items() if value not in (None, {}))
    row: Row = {"key": "/".join([model, policy, task, defining]), "status": DONE}
    row["method"] = f"{model}, {'learned' if figures.get('learned') else policy}"
    row |= {"model": model, "policy": policy, "task": task, "learned": False, "budget": None, "metrics": {}}
    row |= {"main_metric": None, "higher_is_better": True, "requested_ratio": 1.0, "bytes_allocated_per_token": None}
    return row | {"settings": dict(settings), "provenance": provenance()} | figures


def to_frame(rows: Iterable[Row]) -> pandas.DataFrame:
    """Make a table of the measurements of finished rows, whole tasks first, each row's main metric first."""
    shared, of_tasks, places = list[dict[str, Any]](), list[dict[str, Any]](), list[pandas.DataFrame]()
    for number, row in enumerate(rows):
        shared.append(_shared(row))
        of_tasks += [{"row": number, **line} for line in _over_all_samples(row)]
        tables = [value for name, value in row.items() if name.startswith("by_")]
        if heads := row.get("head_ratios"):
            of_heads = {"layer": range(len(heads)), "head": range(len(heads[0])), "samples": 1}
            tables.append(of_heads | {"compression_ratio": heads})
        places += [pandas.DataFrame({"row": number, **lines}) for table in tables for lines in _at_places(table)]
    names = [*Measurement.__annotations__, "folder", *COORDINATES]
    if not of_tasks and not places:
        return pandas.DataFrame(columns=names).astype(TYPES)
    lines = pandas.concat([pandas.DataFrame(of_tasks), *places], ignore_index=True)
    frame = lines.join(pandas.DataFrame(shared, dtype=object), on="row")  # of objects: None stays None
    metric, main = frame["metric"].astype(str), frame.pop("main_metric")
    frame["is_main"] = (metric == main) | main.isna()
    frame["higher_is_better"] &= ~metric.str.endswith(LOWER)
    frame["higher_is_better"] |= metric.str.endswith("tokens_per_second") | (metric == "compression_ratio")
    frame = frame.reindex(columns=[*dict.fromkeys([*names, *frame.columns])]).drop(columns="row")
    return frame.astype(TYPES)


def _shared(row: Row) -> dict[str, Any]:
    """Return the fields that all measurements of a row share."""
    model = (row.get("settings") or {}).get("model") or {}
    names = ["key", "method", "model", "learned", "policy", "budget", "task", "requested_ratio"]
    others = ["benchmark", "split", "question", "samples_key", "reference", "target_counts", "folder"]
    others += ["requested_bytes_per_token"]
    return {
        **{name: row[name] for name in (*names, "higher_is_better", "main_metric")},
        **{name: row.get(name) for name in others},
        **{name: row.get(name) or [] for name in ("members", "contexts")},
        "task_key": json.dumps(settings_of_task(row), sort_keys=True),
        "named": row.get("named", row["model"]),
        "variant": model.get("variant") or row["model"],
        "seed": model.get("seed"),
        "turns": (row.get("settings") or {}).get("turns"),
        "is_full": row["budget"] is None and not row["learned"],
        "achieved_ratio": row.get("mean_achieved_ratio", row["achieved_ratio"]),
        "bytes_per_token": row.get("mean_bytes_allocated_per_token", row["bytes_allocated_per_token"]),
        "end_ratio": row["achieved_ratio"],
        "peak_bytes": row.get("peak_bytes_allocated", row.get("bytes_allocated")),
        "mean_tokens": row.get("mean_tokens") or 1.0,
        "entries_unread": row.get("entries_unread") or 0,
    }


def _over_all_samples(row: Row) -> Iterator[dict[str, Any]]:
    """Yield the measurements of a row over all its samples."""
    main, coordinates = row["main_metric"], row.get("coordinates") or {}
    samples = {main: row.get("sample_values", [])} | (row.get("samples_by_metric") or {})
    errors = row.get("errors") or {}
    for name, value in sorted(row["metrics"].items(), key=lambda item: item[0] != main):
        line = {"metric": name, "value": value, "error": errors.get(name), "samples": samples.get(name, [])}
        yield line | {"num_samples": row.get("samples", 0), "by": " ".join(coordinates)} | coordinates


def _at_places(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a table's measurements; it has coordinates, `samples` (at every place, or one for all) and metrics."""
    names = list(table)[: list(table).index("samples")]
    axes = [numpy.asarray(table[name], dtype=float) for name in names]
    counts = numpy.broadcast_to(table["samples"], list(map(len, axes))).ravel()
    there = counts > 0
    grids = numpy.meshgrid(*axes, indexing="ij")
    places = {name: grid.ravel()[there] for name, grid in zip(names, grids, strict=True)}
    for metric in list(table)[len(names) + 1 :]:
        values = numpy.array(table[metric], dtype=float).ravel()[there]
        yield {**places, "metric": metric, "value": values, "num_samples": counts[there], "by": " ".join(names)}
