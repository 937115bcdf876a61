"""Finished cells as lines of JSON in one file, to which several processes may append."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

Row = dict[str, Any]


class RowStore:
    """Rows by key; of several with the same key the last one counts.

    Args:
        path: of the file; it need not exist yet, its folder is made.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._reported: set[int] = set()

    def append(self, row: Row) -> None:
        """Write a row so that it is there whole or not at all, also beside other processes' rows.

        Raises:
            OSError: it could not be written whole (the disk is full).
        """
        line = json.dumps(row).encode() + b"\n"
        handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":
                line = b"\n" + line  # a line that a crash has torn must not swallow this one
            if os.write(handle, line) != len(line):
                raise OSError(f"{self.path}: a row of {len(line)} bytes was cut short")
            os.fsync(handle)
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
                key = row["key"]
            except (ValueError, TypeError, KeyError):
                if number not in self._reported:
                    logger.warning("%s, line %d is damaged: it is left out, its cell runs again", self.path, number)
                self._reported.add(number)
                continue
            rows.pop(key, None)
            rows[key] = row
        return list(rows.values())

    @property
    def num_damaged(self) -> int:
        """Lines that `rows` has left out so far."""
        return len(self._reported)
