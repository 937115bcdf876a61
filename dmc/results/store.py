"""The one store of results: a line of JSON for each row, in a file to which several processes append.

`Store.frame` is what everything else reads: see `measurement.py`.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas
from filelock import FileLock

from dmc.files import append_line, flattened, written_whole
from dmc.results.measurement import DONE, NOT_FINITE, Row, settings_of_task, to_frame

logger = logging.getLogger(__name__)

FINISHED = (DONE, NOT_FINITE)
"""Statuses of cells that are not run again."""
DONE_BEFORE = "done_before"
"""Field of a failed row: the finished row that it does not replace in tables."""
NAMES = ("key", "status", "method", "model", "policy", "task")
"""Text fields of every row."""
FIGURES = ("metrics", "main_metric", "achieved_ratio", "requested_ratio", "bytes_allocated_per_token")
"""Further fields of a finished row."""


class Store:
    """Rows by key; the last row of a key counts.

    Args:
        path: path of the file; it need not exist, its folder is made.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)  # another process may make it at the same time
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self._rows: dict[str, Row] = {}
        self._file: tuple[int, int] | None = None  # device and inode of what has been read
        self._num_bytes = self._num_lines = 0  # of whole lines that have been read
        self._reported: set[int] = set()

    def append(self, row: Row) -> None:
        """Append a row, also while other processes append.

        Raises:
            OSError: the row could not be written (the disk is full).
        """
        try:
            with FileLock(self.path.with_name(f".{self.path.name}.lock")):
                append_line(self.path, json.dumps(row))
        except OSError as error:
            raise type(error)(error.errno, f"{error.strerror}, its cell runs again", str(self.path)) from error

    def rows(self) -> list[Row]:
        """Return all rows in the order of writing, each key once; damaged lines are logged and left out."""
        return list(self._read().values())

    def row(self, key: str) -> Row | None:
        """Return the row of a key; None: there is none."""
        return self._read().get(key)

    def _read(self) -> dict[str, Row]:
        """Read what has been appended since the last time, also by other processes."""
        if not self.path.exists():
            self._forget()
            return {}
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            if (status.st_dev, status.st_ino) != self._file or status.st_size < self._num_bytes:
                self._forget()
                self._file = status.st_dev, status.st_ino
            file.seek(self._num_bytes)
            *lines, last = file.read().split(b"\n")
        for line in lines:
            self._num_bytes += len(line) + 1
            self._num_lines += 1
            _put(self._rows, self._parse(line, self._num_lines))
        if not last:
            return self._rows
        rows = dict(self._rows)  # a line without its end may be written on, or be torn
        _put(rows, self._parse(last, self._num_lines + 1))
        return rows

    def _parse(self, line: bytes, number: int) -> Row | None:
        """Return a line's row; None: it is empty or damaged, which is reported once."""
        if not line.strip():
            return None
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if is_row(row):
            return row  # type: ignore[no-any-return]
        if number not in self._reported:
            why = "damaged: it is left out, its cell runs again"
            logger.warning("%s, line %d is %s", self.path, number, why)
        self._reported.add(number)
        return None

    def frame(self, keys: Container[str] | None = None) -> pandas.DataFrame:
        """Return the measurements of finished rows (of `keys`; None: all), see `measurement.py`."""
        return to_frame(row for row in read_rows([self], keys) if row["status"] == DONE)


def _put(rows: dict[str, Row], row: Row | None) -> None:
    """Put a row at the end, in the place of an earlier one of its key; a failed one keeps what was finished before."""
    if row is not None:
        before = rows.pop(row["key"], {})
        done = before if before.get("status") == DONE else before.get(DONE_BEFORE)
        rows[row["key"]] = row | {DONE_BEFORE: done} if done and row["status"] not in FINISHED else row


def is_row(row: Any) -> bool:
    """Return whether a line of JSON is a row: it has its names, a status, and if finished, metrics."""
    if not isinstance(row, dict) or any(not isinstance(row.get(name), str) for name in NAMES):
        return False
    if not isinstance(row.get("settings", {}), dict) or any(name not in row for name in ("budget", "learned")):
        return False
    if row["status"] not in FINISHED:
        return True
    return all(name in row for name in FIGURES) and isinstance(row["metrics"], dict)


def read_rows(stores: Iterable[Store], keys: Container[str] | None = None) -> list[Row]:
    """Return the rows (of `keys`; None: all) of several stores, one for each key and its settings.

    Of several a finished one is preferred, then the last. Those of speed and memory, which have coordinates, are kept
    of each folder: two machines may have the same device. The field `folder` is the row's folder. Keys and names are
    made unique over all stores, see `with_unique_names`.
    """
    rows: dict[tuple[str, ...], Row] = {}
    for store in stores:
        for row in (found for last in store.rows() for found in (last.get(DONE_BEFORE), last) if found):
            folder = str(store.path.parent)
            place = row["key"], json.dumps(row.get("settings"), sort_keys=True), folder if "coordinates" in row else ""
            if row["status"] == DONE or rows.get(place, row)["status"] != DONE:
                rows[place] = row | {"folder": folder}
    found: dict[str, Row] = {}
    for row in rows.values():
        if keys is None or row["key"] in keys:
            key = f"{row['key']} of {row['folder']}" if row["key"] in found else row["key"]
            found[key] = row | {"key": key}
    return with_unique_names([*found.values()])


def with_unique_names(rows: Sequence[Row]) -> list[Row]:
    """Return rows whose names of model, policy and task (or benchmark) each stand for one setting.

    `h2o` with `recent` 4 and 8 becomes `h2o (recent=4)` and `h2o (recent=8)`, models and tasks likewise; unambiguous
    names stay. The field `named` keeps the user's name of the model.
    """
    found = [row | {"named": row["model"]} for row in rows]
    for kind in ("model", "policy", "task"):
        settings: dict[str, list[dict[str, Any]]] = {}
        of_row = []
        for row in found:
            column = "benchmark" if kind == "task" and "benchmark" in row else kind
            values = _settings_of(kind, row)
            same_name = settings.setdefault(row[column], [])
            if values not in same_name:
                same_name.append(values)
            of_row.append((row, column, values))
        labels = {name: [label_of(values, same_name) for values in same_name] for name, same_name in settings.items()}
        for row, column, values in of_row:
            name = row[column]
            if label := labels[name][settings[name].index(values)]:
                row[column] = f"{name} ({label})"
    for row in found:
        is_gates = row["learned"] and row["budget"] is None
        row["method"] = f"{row['model']}, {'learned' if is_gates else row['policy']}"
    return found


def _settings_of(kind: str, row: Row) -> dict[str, Any]:
    settings = settings_of_task(row) if kind == "task" else (row.get("settings") or {}).get(kind) or {}
    return {name.removeprefix("task."): value for name, value in flattened(settings).items()}


def label_of(settings: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """Write the settings in which some differ from others: `recent=4, sinks=8`."""
    names = [name for name in settings if any(name not in other or other[name] != settings[name] for other in others)]
    return ", ".join(f"{name.strip('_')}={text_of(settings[name])}" for name in names)


def text_of(value: Any) -> str:
    """Write the value of a setting."""
    if isinstance(value, str):
        return value.rpartition(".")[2] if value.startswith("dmc.") else value
    return json.dumps(value) if not isinstance(value, float) else f"{value:g}"


def refuse_other_settings(rows: Iterable[Row], store: Store) -> None:
    """Check that finished rows of a store have the same settings as these rows of the same keys.

    Raises:
        ValueError: a row was measured with other settings.
    """
    finished = {row["key"]: row for row in store.rows() if row["status"] in FINISHED}
    for row in rows:
        if row["key"] in finished:
            check_settings(row, finished[row["key"]], store)


def check_settings(row: Row, other: Row, store: Store) -> None:
    """Check that a row of a store has the same settings as another row of its key.

    Raises:
        ValueError: it was measured with other settings.
    """
    asked, found = (flattened(json.loads(json.dumps(known.get("settings") or {}))) for known in (row, other))
    for name in dict.fromkeys([*asked, *found]):
        if name not in asked or name not in found or asked[name] != found[name]:
            now, before = (text_of(settings[name]) if name in settings else "not set" for settings in (asked, found))
            raise ValueError(
                f"{store.path} has {row['key']} with {name}={before}, not {now}: give overwrite=true to measure it "
                "again, or another output"
            )


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: the jobs of a sweep write the same one.

    Raises:
        OSError: the file cannot be written; an earlier one stays.
    """
    beside = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        with written_whole(path, beside) as partial:
            partial.write_bytes(content)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error
