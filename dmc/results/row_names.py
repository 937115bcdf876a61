"""Names for rows: models, policies and tasks that share a name are told apart by the settings in which they differ."""

from __future__ import annotations

import json
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
    models, policies, tasks = (_names(rows, part) for part in (_model, _policy, _task))
    found = []
    for row in rows:
        model, policy, task = models[_model(row)[:2]], policies[_policy(row)[:2]], tasks[_task(row)[:2]]
        method = row["method"]
        if (model, policy) != (row["model"], row["policy"]):
            own = row["own_gates"] and row["budget"] is None
            method = f"{model}, {'own gates' if own else policy}"
        names = {"method": method, "model": model, "policy": policy, _task_column(row): task, "named": row["model"]}
        last = {mean: row[name] for mean, name in MEANS.items() if name in row}
        found.append(last | row | names)
    return found


def label_settings(settings: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> str:
    """Write the settings in which one set differs from any of the others: `recent=4, normalise=True`."""
    own, rest = _flat(settings), [_flat(other) for other in others]
    absent = object()
    names = dict.fromkeys(name for each in (own, *rest) for name in each)
    differing = [name for name in names if any(other.get(name, absent) != own.get(name, absent) for other in rest)]
    return ", ".join(f"{name.strip('_')}={_text(own[name])}" for name in differing if name in own)


Part = tuple[str, str, Mapping[str, Any], bool]
"""Name, key, settings, and whether an earlier version wrote them."""


def _model(row: Row) -> Part:
    return row["model"], row["model_key"], _settings(row).get("model") or {}, is_earlier(row)


def _policy(row: Row) -> Part:
    settings = _settings(row).get("policy") or {}
    key = row.get("policy_key") or digest(settings)
    return row["policy"], key, settings, is_earlier(row)


def _task(row: Row) -> Part:
    settings = {name: value for name, value in _settings(row).items() if name not in ("model", "policy")}
    return row[_task_column(row)], row["task_key"], settings, is_earlier(row)


def _settings(row: Row) -> Mapping[str, Any]:
    return row.get("settings") or {}


def _task_column(row: Row) -> str:
    return "benchmark" if "benchmark" in row else "task"


def _names(rows: Sequence[Row], part: Any) -> dict[tuple[str, str], str]:
    """Give every (name, key) a name of its own."""
    parts: dict[str, dict[str, Part]] = {}
    for row in rows:
        found = part(row)
        parts.setdefault(found[0], {}).setdefault(found[1], found)
    names: dict[tuple[str, str], str] = {}
    for name, members in parts.items():
        labels = {key: _label(key, members, tells_age=part is _task) for key in members}
        for key, label in labels.items():
            if list(labels.values()).count(label) > 1:
                label = ", ".join(filter(None, (label, f"#{key[:6]}")))
            names[name, key] = f"{name} ({label})" if label else name
    return names


def _label(key: str, members: Mapping[str, Part], tells_age: bool) -> str:
    """Say how one of several that share a name differs from the others; empty: the name is enough."""
    *_, settings, earlier = members[key]
    same_age = [other for each, (*_, other, is_older) in members.items() if each != key and is_older == earlier]
    told = [EARLIER] if earlier and (tells_age or len(same_age) + 1 < len(members)) else []
    return ", ".join([*told, *filter(None, [label_settings(settings, same_age)])])


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
