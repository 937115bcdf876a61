"""What every task, analysis and benchmark ends in: one number, and everything that defines it.

The whole floor is one path: a task runs in a cell (model x method x budget x task), the cell's row lands in the one
`Store` (`store.py`), `Store.frame` gives its `Measurement`s back as one pandas table, `statistics.py`
says what they show, and tables, plots and the page draw nothing but that. Speed benchmarks and exported
models are no cells of a grid; they write rows too, with `new_row`.

A frame has one line for each measurement and the fields of `Measurement` as columns. Coordinates are columns of their
own (`length`, `depth`, `turn`, `position`, `layer`, `head` ...; NaN where a measurement has none), and the column `by`
names those that a measurement has: "" for a figure of the whole task, "length depth", "position", "layer head".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypedDict

import numpy
import pandas

from dmc.provenance import provenance

Row = dict[str, Any]
"""What the store holds of one cell: its identity, its memory, its settings, and its figures."""
DONE, FAILED, NOT_FINITE = "done", "failed", "not finite"
"""How a cell ends: with figures, an error, or figures that are infinite or no numbers."""
LOWER = ("loss", "perplexity", "bits_per_byte", "seconds")
"""Ends of the names of metrics that are better the lower they are, beside a main one that is not."""
COORDINATES = ("length", "depth", "turn", "position", "entries", "layer", "head", "batch", "memory")
"""Columns that every frame has; others come with the measurements that have them."""
FULL = "full"
"""The policy that keeps everything, or leaves it to the model's own gates."""


class Measurement(TypedDict):
    """One metric of one cell, of all its samples or of those at one place: a line of a frame."""

    key: str
    """Of the cell: hash of everything that defines it."""
    method: str
    """Model and policy, named so that no two settings share a name."""
    model: str
    variant: str
    """What several models are seeds of; the model itself where it stands alone."""
    named: str
    """What the user calls the model; `model` is told apart from others of that name."""
    seed: int | None
    """Which of the variant's seeds the model is."""
    own_gates: bool
    """Whether the model itself is compressed."""
    policy: str
    budget: str | None
    """As settings write it, "4" or "tokens:128"; None: no budget, the full cache or a model's own gates."""
    is_full: bool
    """Whether it is the full cache of a stock model, the yardstick."""
    requested_ratio: float
    """Of entries; for gates what they were trained for."""
    task: str
    benchmark: str | None
    """The figure that it is a part of, the mean of several tasks, or all of; None: the task itself."""
    members: list[str]
    """Tasks of the benchmark: there is no mean of fewer."""
    split: str | None
    """Of the text that the task is made of."""
    question: str | None
    """`known` or `hidden` while the cache was compressed; None: there is none."""
    metric: str
    is_main: bool
    """Whether it is the task's own choice."""
    higher_is_better: bool
    value: float
    error: float
    """Standard error as the task gives it, where no samples are kept."""
    by: str
    """Names of the coordinates."""
    samples: list[float]
    """Of each sample, in their order; empty: not kept."""
    contexts: list[Any]
    """What each sample shares with others, a file or a text: those of one context are no independent evidence. Empty:
    each has one of its own."""
    samples_key: str | None
    """The same where the samples are: only those are paired."""
    num_samples: int
    achieved_ratio: float
    """Tokens over entries, both in sum over all positions that were predicted."""
    bytes_per_token: float
    """Allocated, whole pages and all other state, over the same positions: what "equal memory" means."""
    end_ratio: float
    """At the last step of each sample: what a target means."""
    end_bytes_per_token: float
    peak_bytes: float
    """The most at any position of any sample."""
    mean_tokens: float
    """Tokens seen, over the positions and samples: the weight of a ratio."""
    device: str
    reference: str | None
    """Model with whose full cache a compressed one is compared."""
    task_key: str
    """Hash of the task's settings and the engine's: only rows of one key are compared."""
    settings: dict[str, Any]
    """Model, policy with all its options, task, engine, seed."""
    provenance: dict[str, Any]
    """Command, commit, machine, versions."""


TYPES: dict[str, type] = {
    **dict.fromkeys(("own_gates", "is_full", "is_main", "higher_is_better"), bool),
    **dict.fromkeys(("value", "error", "requested_ratio", "achieved_ratio", "bytes_per_token", "mean_tokens"), float),
    **dict.fromkeys(("end_ratio", "end_bytes_per_token", "peak_bytes", *COORDINATES), float),
}


def digest(content: Any) -> str:
    """Hash what JSON can hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def new_row(model: str, policy: str, task: str, settings: Mapping[str, Any], **figures: Any) -> Row:
    """Return a finished row of something that is no cell of a grid.

    Args:
        model: its name.
        policy: name of the method, or of whatever else holds the cache.
        task: what is measured.
        settings: `model`, `policy`, `task` and all else that defines it; rows with the same ones replace each other.
        figures: other fields of the row, such as `metrics`, `main_metric` (None: all metrics are), `coordinates` of
            them, and tables by place, `by_layer_and_head={"layer": ..., "head": ..., "samples": 1, METRIC: nested}`.
    """
    place = figures.get("coordinates")
    of_task = {name: value for name, value in settings.items() if name not in ("model", "policy")}
    keys = {"model_key": settings.get("model"), "policy_key": settings.get("policy"), "task_key": of_task}
    row: Row = {"key": digest([model, policy, task, settings, place]), "status": DONE}
    row["method"] = f"{model}, {'learned' if figures.get('own_gates') else policy}"
    row |= {"model": model, "policy": policy, "task": task, "own_gates": False, "budget": None, "metrics": {}}
    row |= {name: digest(value) for name, value in keys.items()}
    row |= {"main_metric": None, "higher_is_better": True, "requested_ratio": 1.0, "bytes_allocated_per_token": None}
    return row | {"settings": dict(settings), "provenance": provenance()} | figures


def to_frame(rows: Iterable[Row]) -> pandas.DataFrame:
    """Put the measurements of finished rows into a table, those of whole tasks first, each row's main metric first."""
    shared, whole, places = list[dict[str, Any]](), list[dict[str, Any]](), list[pandas.DataFrame]()
    for number, row in enumerate(rows):
        shared.append(_shared(row))
        whole += [{"row": number, **line} for line in _whole(row)]
        tables = [value for name, value in row.items() if name.startswith("by_")]
        if heads := row.get("head_ratios"):
            of_heads = {"layer": range(len(heads)), "head": range(len(heads[0])), "samples": 1}
            tables.append(of_heads | {"compression_ratio": heads})
        places += [pandas.DataFrame({"row": number, **lines}) for each in tables for lines in _at_places(each)]
    names = [*Measurement.__annotations__, "folder", *COORDINATES]
    if not whole and not places:
        return pandas.DataFrame(columns=names).astype(TYPES)
    lines = pandas.concat([pandas.DataFrame(whole), *places], ignore_index=True)
    frame = lines.join(pandas.DataFrame(shared, dtype=object), on="row")  # of objects: None stays None
    metric, main = frame["metric"].astype(str), frame.pop("main_metric")
    frame["is_main"] = (metric == main) | main.isna()
    frame["higher_is_better"] &= ~metric.str.endswith(LOWER)
    frame["higher_is_better"] |= metric.str.endswith("tokens_per_second") | (metric == "compression_ratio")
    frame = frame.reindex(columns=[*dict.fromkeys([*names, *frame.columns])]).drop(columns="row")
    return frame.astype(TYPES)


def _shared(row: Row) -> dict[str, Any]:
    """Read what all measurements of a row have in common."""
    model = (row.get("settings") or {}).get("model") or {}
    model = model if isinstance(model, dict) else {}
    names = ("key", "method", "model", "own_gates", "policy", "budget", "task", "task_key", "requested_ratio")
    others = ("benchmark", "split", "question", "samples_key", "reference", "settings", "provenance")
    return {
        **{name: row[name] for name in (*names, "higher_is_better", "main_metric")},
        **{name: row.get(name) for name in others},
        **{name: row.get(name) or [] for name in ("members", "contexts")},
        "named": row.get("named", row["model"]),
        "variant": model.get("variant") or row["model"],
        "seed": model.get("seed"),
        "is_full": row["budget"] is None and not row["own_gates"],
        "achieved_ratio": row.get("mean_achieved_ratio", row["achieved_ratio"]),
        "bytes_per_token": row.get("mean_bytes_allocated_per_token", row["bytes_allocated_per_token"]),
        "end_ratio": row["achieved_ratio"],
        "end_bytes_per_token": row["bytes_allocated_per_token"],
        "peak_bytes": row.get("peak_bytes_allocated", row.get("bytes_allocated")),
        "mean_tokens": row.get("mean_tokens") or 1.0,
        "device": row.get("device") or "",
        "folder": row.get("folder"),
    }


def _whole(row: Row) -> Iterator[dict[str, Any]]:
    """Give the figures of a row that are of all its samples."""
    main, coordinates = row["main_metric"], row.get("coordinates") or {}
    samples = {main: row.get("sample_values", [])} | (row.get("samples_by_metric") or {})
    errors, speeds = row.get("errors") or {}, ("prefill_tokens_per_second", "decode_tokens_per_second")
    metrics = row["metrics"] | {name: row[name] for name in speeds if row.get(name) is not None}
    for name, value in sorted(metrics.items(), key=lambda item: (item[0] != main, item[0] in speeds)):
        line = {"metric": name, "value": value, "error": errors.get(name), "samples": samples.get(name, [])}
        yield line | {"num_samples": row.get("samples", 0), "by": " ".join(coordinates)} | coordinates


def _at_places(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Unfold a table: coordinates, then `samples` (at every place, or one number for all), then the metrics."""
    names = list(table)[: list(table).index("samples")]
    axes = [numpy.asarray(table[name], dtype=float) for name in names]
    counts = numpy.broadcast_to(table["samples"], list(map(len, axes))).ravel()
    there = counts > 0
    grids = numpy.meshgrid(*axes, indexing="ij")
    places = {name: grid.ravel()[there] for name, grid in zip(names, grids, strict=True)}
    for metric in list(table)[len(names) + 1 :]:
        values = numpy.array(table[metric], dtype=float).ravel()[there]
        yield {**places, "metric": metric, "value": values, "num_samples": counts[there], "by": " ".join(names)}
