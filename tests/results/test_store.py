import json
import logging
import multiprocessing

from dmc.results.measurement import DONE, FAILED, new_row, to_frame
from dmc.results.store import Store, read_rows


def row(key, **values):
    names = dict.fromkeys(("method", "model", "policy", "task"), "name")
    return {"key": key, "status": "failed", **names, "budget": None, "learned": False, **values}


def test_of_rows_with_one_key_the_last_counts(tmp_path):
    store = Store(tmp_path / "new" / "cells.jsonl")
    assert store.rows() == []
    for appended in (row("a", value=1), row("b", value=2), row("a", value=3)):
        store.append(appended)
    assert store.rows() == [row("b", value=2), row("a", value=3)]


def test_a_line_is_read_once_however_often_rows_are_asked_for(tmp_path, monkeypatch):
    store, other = Store(tmp_path / "cells.jsonl"), Store(tmp_path / "cells.jsonl")
    parsed, loads = [], json.loads
    monkeypatch.setattr("dmc.results.store.json.loads", lambda line: parsed.append(line) or loads(line))
    for number in range(3):
        other.append(row(f"{number}"))
        assert [store.row("0"), store.row("x"), len(store.rows())] == [row("0"), None, number + 1]
    assert len(parsed) == 3
    text = json.dumps(row("torn"))
    for piece in (text[:9], text[9:], "\n"):  # another process is writing
        with store.path.open("a") as file:
            file.write(piece)
        assert (store.row("torn") is not None) == (piece != text[:9])
    store.path.unlink()
    assert store.rows() == []
    other.append(row("new"))
    assert store.rows() == [row("new")]


def damaged(**changes):
    return json.dumps(row("k") | changes).encode() + b"\n"


DAMAGES = [b'{"key": "tor', b"[1]\n", b'{"no key": 1}\n', b"\xff\xfe\n", b'"text"\n', b"[" * 100_000 + b"\n"]
DAMAGES += [damaged(status=None), damaged(key=[1]), damaged(model={}), damaged(settings=[]), damaged(status="done")]
DAMAGES += [json.dumps({name: value for name, value in row("k").items() if name != "policy"}).encode() + b"\n"]


def test_damaged_lines_are_reported_once_and_swallow_no_other(tmp_path, caplog):
    path = tmp_path / "cells.jsonl"
    store = Store(path)
    for number, damage in enumerate(DAMAGES):
        store.append(row(f"before {number}"))
        path.write_bytes(path.read_bytes() + damage)
    store.append(row("after"))
    with caplog.at_level(logging.WARNING):
        assert [found["key"] for found in store.rows()] == [*(f"before {n}" for n in range(len(DAMAGES))), "after"]
        store.rows()
    why = "damaged: it is left out, its cell runs again"
    lines = range(2, 2 * len(DAMAGES) + 1, 2)
    assert [record.getMessage() for record in caplog.records] == [f"{path}, line {line} is {why}" for line in lines]


def append_many(path, writer):
    for number in range(50):
        Store(path).append(row(f"{writer}{number}", padding=writer * 5000))


def test_two_processes_append_whole_lines(tmp_path):
    path = tmp_path / "cells.jsonl"
    with multiprocessing.get_context("fork").Pool(2) as writers:
        writers.starmap(append_many, [(path, "x"), (path, "y")], chunksize=1)
    rows = [json.loads(line) for line in path.read_text().splitlines() if line]
    assert {row["key"] for row in rows} == {f"{writer}{number}" for writer in "xy" for number in range(50)}
    assert all(row["padding"] == row["key"][0] * 5000 for row in rows)


def test_a_failure_hides_no_finished_row_of_its_cell_in_tables_and_is_measured_again(tmp_path):
    done = new_row("base", "h2o", "loss", {}, metrics={"loss": 1.0}, achieved_ratio=4.0)
    store = Store(tmp_path / "cells.jsonl")
    for row in (done, *[done | {"status": FAILED, "error": "out of memory"}] * 2):
        store.append(row)
    assert store.row(done["key"])["status"] == FAILED
    for found in (store, Store(store.path)):
        assert [row["metrics"] for row in read_rows([found])] == [{"loss": 1.0}]
        assert len(found.frame()) == len(to_frame([done]))
    store.append(done | {"metrics": {"loss": 2.0}})
    assert [row["metrics"] for row in read_rows([store])] == [{"loss": 2.0}]


def test_a_failure_in_one_folder_hides_no_finished_cell_of_another(tmp_path):
    stores = [Store(tmp_path / name / "cells.jsonl") for name in ("a", "b")]
    done = new_row("base", "h2o", "loss", {}, metrics={"loss": 1.0}, achieved_ratio=4.0)
    stores[0].append(done)
    stores[1].append(done | {"status": FAILED, "error": "out of memory"})
    for order in (stores, stores[::-1]):
        assert [row["status"] for row in read_rows(order)] == [DONE]
