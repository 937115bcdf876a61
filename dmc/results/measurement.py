"""What every task, analysis and benchmark ends in: one number, and everything that defines it.

The whole floor is one path: a task runs in a cell (model x method x budget x task), the cell writes its `Measurement`s
into the one `Store` (`store.py`), `Store.frame` and `read_frame` give them back as one pandas table, `statistics.py`
says what they show, and tables, plots and the page draw nothing but that.

A frame has one line for each measurement and the fields of `Measurement` as columns. `coordinates` are columns of their
own (`length`, `depth`, `turn`, `position`, `layer`, `head` ...; NaN where a measurement has none), and the column `by`
names those that a measurement has: "" for a figure of the whole task, "length depth", "position", "layer head".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas

Row = dict[str, Any]
"""What the store holds of one cell: its identity, its memory, its settings, and its figures."""
LOWER = ("loss", "perplexity", "bits_per_byte")
"""Ends of the names of metrics that are better the lower they are, beside a main one that is not."""
COORDINATES = ("length", "depth", "turn", "position", "entries", "layer", "head")
"""Columns that every frame has; others come with the measurements that have them."""
FULL = "full"
"""The policy that keeps everything, or leaves it to the model's own gates."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One metric of one cell: of all its samples, or of those at one place."""

    key: str
    """Of the cell: hash of everything that defines it."""
    method: str
    """Model and policy, named so that no two settings share a name."""
    model: str
    variant: str
    """What several models are seeds of; the model itself where it stands alone."""
    named: str
    """What the user calls the model; `model` is told apart from others of that name."""
    seed: int | None = None
    """Which of the variant's seeds the model is."""
    own_gates: bool
    """Whether the model itself is compressed."""
    policy: str
    budget: str | None
    """As settings write it, "4" or "tokens:128"; None: no budget, the full cache or a model's own gates."""
    requested_ratio: float
    """Of entries; for gates what they were trained for."""
    task: str
    benchmark: str | None = None
    """The figure that it is a part of, the mean of several tasks, or all of; None: the task itself."""
    members: list[str] = field(default_factory=list)
    """Tasks of the benchmark: there is no mean of fewer."""
    split: str | None = None
    """Of the text that the task is made of."""
    question: str | None = None
    """`known` or `hidden` while the cache was compressed; None: there is none."""
    metric: str
    is_main: bool
    """Whether it is the task's own choice."""
    higher_is_better: bool
    value: float
    error: float | None = None
    """Standard error as the task gives it, where no samples are kept."""
    coordinates: dict[str, float] = field(default_factory=dict)
    samples: list[float] = field(default_factory=list)
    """Of each sample, in their order; empty: not kept."""
    contexts: list[Any] = field(default_factory=list)
    """What each sample shares with others, a file or a text: those of one context are no independent evidence. Empty:
    each has one of its own."""
    samples_key: str | None = None
    """The same where the samples are: only those are paired."""
    num_samples: int = 0
    achieved_ratio: float
    """Tokens over entries, both in sum over all positions that were predicted."""
    bytes_per_token: float
    """Allocated, whole pages and all other state, over the same positions: what "equal memory" means."""
    end_ratio: float
    """At the last step of each sample: what a target means."""
    end_bytes_per_token: float
    peak_bytes: int | None = None
    """The most at any position of any sample."""
    mean_tokens: float = 1.0
    """Tokens seen, over the positions and samples: the weight of a ratio."""
    device: str = ""
    reference: str | None = None
    """Model with whose full cache a compressed one is compared."""
    task_key: str = ""
    """Hash of the task's settings and the engine's: only rows of one key are compared."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Model, policy with all its options, task, engine, seed."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Command, commit, machine, versions."""

    @property
    def is_full(self) -> bool:
        """Whether it is the full cache of a stock model, the yardstick."""
        return self.budget is None and not self.own_gates


def measurements_of(row: Row) -> list[Measurement]:
    """Read the finished row of a cell, the main metric first."""
    model = (row.get("settings") or {}).get("model") or {}
    shared: dict[str, Any] = {
        **{name: row[name] for name in ("key", "method", "model", "own_gates", "policy", "budget", "task")},
        **{name: row[name] for name in ("requested_ratio", "higher_is_better", "task_key")},
        **{name: row[name] for name in OPTIONAL if row.get(name) is not None},
        "variant": model.get("variant") or row["model"],
        "seed": model.get("seed"),
        "named": row.get("named", row["model"]),
        "achieved_ratio": row.get("mean_achieved_ratio", row["achieved_ratio"]),
        "bytes_per_token": row.get("mean_bytes_allocated_per_token", row["bytes_allocated_per_token"]),
        "end_ratio": row["achieved_ratio"],
        "end_bytes_per_token": row["bytes_allocated_per_token"],
        "peak_bytes": row.get("peak_bytes_allocated", row.get("bytes_allocated")),
        "num_samples": row.get("samples", 0),
    }
    main, samples = row["main_metric"], row.get("samples_by_metric") or {}
    if main not in samples and "sample_values" in row:
        samples = samples | {main: row["sample_values"]}
    found = [
        Measurement(
            **shared | {"higher_is_better": row["higher_is_better"] and not name.endswith(LOWER)},
            metric=name,
            is_main=name == main,
            value=value,
            samples=samples.get(name, []),
            error=(row.get("errors") or {}).get(name),
        )
        for name, value in sorted(row["metrics"].items(), key=lambda item: item[0] != main)
    ]
    for name in ("prefill_tokens_per_second", "decode_tokens_per_second"):
        if row.get(name) is not None:
            speed = shared | {"higher_is_better": True}
            found.append(Measurement(**speed, metric=name, is_main=False, value=row[name]))
    without = {name: value for name, value in shared.items() if name not in ("contexts", "samples_key", "num_samples")}
    for table in (value for name, value in row.items() if name.startswith("by_")):
        found += _at_places(table, without, main)
    for layer, heads in enumerate(row.get("head_ratios") or []):
        for head, ratio in enumerate(heads):
            own = {"coordinates": {"layer": float(layer), "head": float(head)}, "value": ratio}
            higher = without | {"higher_is_better": True}
            found.append(Measurement(**higher, **own, metric="compression_ratio", is_main=False))
    return found


OPTIONAL = (
    *(
        "benchmark",
        "members",
        "split",
        "question",
        "contexts",
        "samples_key",
        "mean_tokens",
        "device",
        "reference",
        "settings",
    ),
    "provenance",
)


def _at_places(table: dict[str, list[Any]], shared: dict[str, Any], main: str) -> Iterable[Measurement]:
    names = list(table)[: list(table).index("samples")]
    for indices in itertools.product(*(range(len(table[name])) for name in names)):
        count = _at(table["samples"], indices)
        place = {name: float(table[name][index]) for name, index in zip(names, indices, strict=True)}
        for metric in list(table)[len(names) + 1 :] if count else []:
            own = {"metric": metric, "is_main": metric == main, "value": _at(table[metric], indices)}
            own["higher_is_better"] = shared["higher_is_better"] and not metric.endswith(LOWER)
            yield Measurement(**shared | own, coordinates=place, num_samples=count)


def _at(nested: Any, indices: Sequence[int]) -> Any:
    for index in indices:
        nested = nested[index]
    return nested


def to_frame(measurements: Iterable[Measurement]) -> pandas.DataFrame:
    """Put measurements into a table: see the module."""
    lines = []
    for each in measurements:
        line = {name: value for name, value in vars(each).items() if name != "coordinates"}
        lines.append(line | {"is_full": each.is_full, "by": " ".join(each.coordinates)} | each.coordinates)
    names = [name for name in Measurement.__dataclass_fields__ if name != "coordinates"]
    frame = pandas.DataFrame(lines, columns=None if lines else [*names, "is_full", "by"])
    frame["error"] = pandas.Series([each["error"] for each in lines], dtype=float)
    for name in (*("budget", "benchmark", "split", "question", "samples_key", "reference"), "seed"):
        frame[name] = pandas.Series([each.get(name) for each in lines], dtype=object)  # None stays None
    frame = frame.astype(dict.fromkeys(("own_gates", "is_main", "is_full", "higher_is_better"), bool))
    for name in COORDINATES:
        if name not in frame:
            frame[name] = float("nan")
    return frame
