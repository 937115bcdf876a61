"""The one store of results: a line of JSON for each cell, in a file to which several processes append.

`Store.frame` is what everything else reads: see `measurement.py`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas

from dmc.files import flattened
from dmc.results.measurement import DONE, NOT_FINITE, Row, to_frame

logger = logging.getLogger(__name__)

FINISHED = (DONE, NOT_FINITE)
"""Statuses of cells that are not run again."""
NAMES = ("key", "status", "method", "model", "policy", "task", "model_key", "policy_key", "task_key")
"""Text fields of every row."""
KINDS = ("model", "policy", "task")
"""Fields whose names are made unique."""
FIGURES = ("metrics", "main_metric", "achieved_ratio", "requested_ratio", "bytes_allocated_per_token")
"""Further fields of a finished row."""


class Store:
    """Rows by key; the last row of a key counts.

    Args:
        path: path of the file; it need not exist, its folder is made.
    Raises:
        OSError: the folder is a file, or may not be written to.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)  # another process may make it at the same time
        self.path = path
        self._reported: set[int] = set()

    def append(self, row: Row) -> None:
        """Append a row atomically, also while other processes append.

        Raises:
            OSError: the row could not be written whole (the disk is full).
        """
        line = json.dumps(row).encode() + b"\n"
        handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            with contextlib.suppress(OSError):  # without locks a shared disk's machines disagree on a file's end
                fcntl.lockf(handle, fcntl.LOCK_EX)
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":
                line = b"\n" + line  # a line that a crash has torn must not swallow this one
            if os.write(handle, line) != len(line):
                raise OSError(errno.ENOSPC, "a row was cut short", str(self.path))
            os.fsync(handle)
        except OSError as error:
            raise type(error)(error.errno, f"{error.strerror}, its cell runs again", str(self.path)) from error
        finally:
            os.close(handle)

    def rows(self) -> list[Row]:
        """Read all rows in the order of writing, each key once; damaged lines are logged and left out."""
        rows: dict[str, Row] = {}
        content = self.path.read_bytes() if self.path.exists() else b""
        for number, line in enumerate(content.split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not is_row(row):
                if number not in self._reported:
                    why = "damaged: it is left out, its cell runs again"
                    logger.warning("%s, line %d is %s", self.path, number, why)
                self._reported.add(number)
                continue
            rows.pop(row["key"], None)
            rows[row["key"]] = row
        return list(rows.values())

    def frame(self, keys: Container[str] | None = None) -> pandas.DataFrame:
        """Return the measurements of finished cells (of `keys`; None: all), see `measurement.py`."""
        return to_frame(row for row in read_rows([self], keys) if row["status"] == DONE)


def read_rows(stores: Iterable[Store], keys: Container[str] | None = None) -> list[Row]:
    """Return the rows (of `keys`; None: all) of several stores, each key once, preferring a finished row.

    The field `folder` is the row's folder. Names are made unique over all stores: no two settings share one.
    """
    rows: dict[str, Row] = {}
    for row in (row | {"folder": str(store.path.parent)} for store in stores for row in store.rows()):
        if row["status"] == DONE or rows.get(row["key"], row)["status"] != DONE:
            rows[row["key"]] = row
    return told_apart([row for key, row in rows.items() if keys is None or key in keys])


def told_apart(rows: Sequence[Row]) -> list[Row]:
    """Return rows with unique names of model, policy and task (or benchmark): each stands for one setting.

    `h2o` with `recent` 4 and 8 becomes `h2o (recent=4)` and `h2o (recent=8)`, models and tasks likewise; unambiguous
    names stay. The field `named` keeps the user's name of the model.
    """
    found = [row | {"named": row["model"]} for row in rows]
    for kind in KINDS:
        # the settings of loads are the points of one curve
        own = [row for row in found if kind != "task" or row["task"] != "load"]
        known: dict[str, dict[str, Row]] = {}
        for row in own:
            known.setdefault(row[_column(kind, row)], {})[row[f"{kind}_key"]] = _settings_of(kind, row)
        labels = {name: _labels(settings) for name, settings in known.items()}
        for row in own:
            column = _column(kind, row)
            if label := labels[row[column]][row[f"{kind}_key"]]:
                row[column] += f" ({label})"
    for row in found:
        is_gates = row["learned"] and row["budget"] is None
        row["method"] = f"{row['model']}, {'learned' if is_gates else row['policy']}"
    return found


def _settings_of(kind: str, row: Row) -> Row:
    settings = row.get("settings") or {}
    if kind == "task":
        return flattened({name: value for name, value in settings.items() if name not in ("model", "policy")})
    return flattened(settings.get(kind) or {}) | {name: settings[name] for name in ("format",) if name in settings}


def _column(kind: str, row: Row) -> str:
    return "benchmark" if kind == "task" and "benchmark" in row else kind


def _labels(known: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Write for each key the settings in which it differs from others: `recent=4, sinks=8`."""
    told = {}
    for key, own in known.items():
        others = [other for each, other in known.items() if each != key]
        names = [name for name in own if any(name not in other or other[name] != own[name] for other in others)]
        if others and all("format" in own and other.get("format") != own["format"] for other in others):
            names = ["format"]  # which other settings a row tells may have changed with it
        told[key] = ", ".join(f"{name.rpartition('.')[2].strip('_')}={_text(own[name])}" for name in names)
    alike = [*told.values()]
    return {
        key: label if alike.count(label) == 1 else ", ".join(filter(None, (label, f"#{key[:6]}")))
        for key, label in told.items()
    }


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value.rpartition(".")[2] if value.startswith("dmc.") else value
    return json.dumps(value) if not isinstance(value, float) else f"{value:g}"


def is_row(row: Any) -> bool:
    """Return whether a line of JSON is a row: it has an identity, a status, and if finished, metrics."""
    if not isinstance(row, dict) or any(not isinstance(row.get(name), str) for name in NAMES):
        return False
    named = all(name in row for name in ("budget", "learned"))
    if row["status"] not in FINISHED:
        return named
    return named and all(name in row for name in FIGURES) and isinstance(row["metrics"], dict)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: the jobs of a sweep write the same one.

    Raises:
        OSError: the file cannot be written; an earlier one stays.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
