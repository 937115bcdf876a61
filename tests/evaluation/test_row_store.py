from __future__ import annotations

import json
import logging
import multiprocessing
from pathlib import Path

import pytest

from dmc.evaluation.row_store import RowStore


def append_many(path: Path, writer: str, count: int) -> None:
    store = RowStore(path)
    for number in range(count):
        store.append({"key": f"{writer}{number}", "padding": writer * 5000})


def test_of_rows_with_one_key_the_last_counts(tmp_path: Path) -> None:
    store = RowStore(tmp_path / "new" / "cells.jsonl")
    assert store.rows() == []
    for row in ({"key": "a", "value": 1}, {"key": "b", "value": 2}, {"key": "a", "value": 3}):
        store.append(row)
    assert store.rows() == [{"key": "b", "value": 2}, {"key": "a", "value": 3}]


@pytest.mark.parametrize("damage", [b'{"key": "tor', b"[1]\n", b'{"no key": 1}\n', b"\xff\xfe\n", b'"text"\n'])
def test_damaged_lines_are_told_once_and_swallow_no_other(
    damage: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cells.jsonl"
    store = RowStore(path)
    store.append({"key": "before"})
    path.write_bytes(path.read_bytes() + damage)
    store.append({"key": "after"})
    with caplog.at_level(logging.WARNING):
        assert [row["key"] for row in store.rows()] == ["before", "after"]
        store.rows()
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}, line 2 is damaged: it is left out, its cell runs again"
    ]


def test_two_processes_append_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=append_many, args=(path, writer, 50)) for writer in "xy"]
    for each in writers:
        each.start()
    for each in writers:
        each.join(60)
    assert [each.exitcode for each in writers] == [0, 0]
    rows = [json.loads(line) for line in path.read_text().splitlines() if line]
    assert {row["key"] for row in rows} == {f"{writer}{number}" for writer in "xy" for number in range(50)}
    assert all(row["padding"] == row["key"][0] * 5000 for row in rows)
