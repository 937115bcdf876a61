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
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import pandas

from dmc.results.measurement import DONE, NOT_FINITE, Row, to_frame
from dmc.results.row_names import told_apart

logger = logging.getLogger(__name__)

FINISHED = (DONE, NOT_FINITE)
"""What is not run again."""
NAMES = ("key", "status", "method", "model", "policy", "task", "model_key", "task_key")
"""Texts that every row has."""
FIGURES = ("metrics", "main_metric", "achieved_ratio", "requested_ratio", "bytes_allocated_per_token")
"""What a finished row has beside them."""


class Store:
    """Rows by key; of several with the same key the last one counts.

    Args:
        path: of the file; it need not exist yet, its folder is made.
    Raises:
        OSError: the folder is a file, or may not be written to.
    """

    def __init__(self, path: Path) -> None:
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True)
        self.path = path
        self._reported: set[int] = set()
        self._told_earlier = False

    def append(self, row: Row) -> None:
        """Write a row so that it is there whole or not at all, also beside other processes' rows.

        Raises:
            OSError: it could not be written whole (the disk is full).
        """
        line = json.dumps(row).encode() + b"\n"
        handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            lock(handle)
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
        """Read all rows in the order in which they were written, each key once; damaged lines are told and left out."""
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
                    logger.warning("%s, line %d is damaged: it is left out, its cell runs again", self.path, number)
                self._reported.add(number)
                continue
            rows.pop(row["key"], None)
            rows[row["key"]] = row
        earlier = sum("policy_key" not in row for row in rows.values())
        if earlier and not self._told_earlier:
            logger.warning(
                "%s: %d rows are of an earlier version: they are shown, but stand for no cell of this one",
                self.path,
                earlier,
            )
            self._told_earlier = True
        return list(rows.values())

    def frame(self, keys: Container[str] | None = None) -> pandas.DataFrame:
        """Return the measurements of finished cells (of `keys`; None: all), see `measurement.py`."""
        return to_frame(row for row in read_rows([self], keys) if row["status"] == DONE)

    @property
    def num_damaged(self) -> int:
        """Lines that `rows` has left out so far."""
        return len(self._reported)


def read_rows(stores: Iterable[Store], keys: Container[str] | None = None) -> list[Row]:
    """Return the rows (of `keys`; None: all) of several stores, each key once, finished where it is anywhere.

    The field `folder` says where a row lies. Names are told apart over all of them: no two settings share one.
    """
    rows: dict[str, Row] = {}
    for row in (row | {"folder": str(store.path.parent)} for store in stores for row in store.rows()):
        if row["status"] == DONE or rows.get(row["key"], row)["status"] != DONE:
            rows[row["key"]] = row
    return told_apart([row for key, row in rows.items() if keys is None or key in keys])


def is_row(row: Any) -> bool:
    """Whether a line of JSON is a row: it says what it measures, how that ended, and if well, the figures."""
    if not isinstance(row, dict) or any(not isinstance(row.get(name), str) for name in NAMES):
        return False
    named = all(name in row for name in ("budget", "own_gates"))
    return named and (row["status"] not in FINISHED or all(name in row for name in FIGURES))


def lock(handle: int) -> None:
    """Keep other processes that append from writing, until the file is closed.

    Of a disk that machines share, each of them knows the end of a file only so; one without locks is appended to as it
    is.
    """
    with contextlib.suppress(OSError):
        fcntl.lockf(handle, fcntl.LOCK_EX)
