"""Names for rows: models, policies and tasks that share a name are told apart by the settings in which they differ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dmc.results.measurement import Row, digest

EARLIER = "earlier version"
"""What is said of rows whose settings an earlier version has not written in full, nor measured as this one does."""
MEANS = {
    "mean_achieved_ratio": "achieved_ratio",
    "mean_bytes_allocated_per_token": "bytes_allocated_per_token",
    "mean_bytes_used_per_token": "bytes_used_per_token",
    "peak_bytes_allocated": "bytes_allocated",
    "mean_tokens": "peak_tokens",
}
"""Memory over all positions that were predicted, and what rows of an earlier version show for it: that of the last."""


def is_earlier(row: Row) -> bool:
    """Whether an earlier version has written a row: it does not say all that defines it."""
    return "policy_key" not in row


def told_apart(rows: Sequence[Row]) -> list[Row]:
    """Return rows whose model, policy and task (or benchmark) have a name that stands for one setting only.

    `h2o` with `recent` 4 and 8 becomes `h2o (recent=4)` and `h2o (recent=8)`, models and tasks likewise; names that
    stand for one thing stay. Under `named` a row keeps what the user called its model.
    """
    parts = [_parts(row) for row in rows]
    names = {}
    for kind in ("model", "policy", "task"):
        known = {own[kind][:2]: (own[kind][2], is_earlier(row)) for row, own in zip(rows, parts, strict=True)}
        names[kind] = _names(known, tells_age=kind == "task")
    found = []
    for row, own in zip(rows, parts, strict=True):
        model, policy, task = (names[kind][own[kind][:2]] for kind in names)
        method = row["method"]
        if (model, policy) != (row["model"], row["policy"]):
            method = f"{model}, {'own gates' if row['own_gates'] and row['budget'] is None else policy}"
        told = {"method": method, "model": model, "policy": policy, _task_column(row): task, "named": row["model"]}
        found.append({mean: row[name] for mean, name in MEANS.items() if name in row} | row | told)
    return found


def _parts(row: Row) -> dict[str, tuple[str, str, Mapping[str, Any]]]:
    """Give name, key and settings of a row's model, policy and task."""
    settings = row.get("settings") or {}
    model, policy = (settings.get(name) or {} for name in ("model", "policy"))
    task = {name: value for name, value in settings.items() if name not in ("model", "policy")}
    return {
        "model": (row["model"], row["model_key"], model),
        "policy": (row["policy"], row.get("policy_key") or digest(policy), policy),
        "task": (row[_task_column(row)], row["task_key"], task),
    }


def _task_column(row: Row) -> str:
    return "benchmark" if "benchmark" in row else "task"


def _names(
    parts: Mapping[tuple[str, str], tuple[Mapping[str, Any], bool]], tells_age: bool
) -> dict[tuple[str, str], str]:
    """Give every (name, key) with its settings, and whether they are an earlier version's, a name of its own."""
    labels = {}
    for (name, key), (settings, is_old) in parts.items():
        others = [part for (other, its_key), part in parts.items() if other == name and its_key != key]
        same_age = [each for each, is_older in others if is_older == is_old]
        told = [EARLIER] if is_old and (tells_age or len(same_age) < len(others)) else []
        labels[name, key] = ", ".join([*told, *filter(None, [_differing(settings, same_age)])])
    alike = Counter((name, label) for (name, _), label in labels.items())
    for (name, key), label in labels.items():
        if alike[name, label] > 1:
            label = ", ".join(filter(None, (label, f"#{key[:6]}")))
        labels[name, key] = f"{name} ({label})" if label else name
    return labels


def _differing(settings: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> str:
    """Write the settings in which one set differs from any of the others: `recent=4, normalise=True`."""
    own, rest = _flat(settings), [_flat(other) for other in others]
    absent = object()
    names = dict.fromkeys(name for each in (own, *rest) for name in each)
    differing = [name for name in names if any(other.get(name, absent) != own.get(name, absent) for other in rest)]
    return ", ".join(f"{name.strip('_')}={_text(own[name])}" for name in differing if name in own)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Name settings inside others by their last name: options are told as the user writes them."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            inner = _flat(value)
            found |= {(key if key not in found else f"{name}.{key}"): each for key, each in inner.items()}
        else:
            found[name] = value
    return found


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value.rpartition(".")[2] if value.startswith("dmc.") else value
    return json.dumps(value) if not isinstance(value, float) else f"{value:g}"
