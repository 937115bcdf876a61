"""A reader finds a whole checkpoint at every moment of a run that writes them."""

from __future__ import annotations

import os
import threading

from dmc.training.checkpoints.generations import Generations, latest


def test_a_file_is_there_while_the_next_takes_its_place(tmp_path):
    target, generations, seen, done = tmp_path / "last.ckpt", Generations(), [], threading.Event()

    def write(step: int) -> None:
        partial = tmp_path / "partial"
        partial.write_text(str(step))
        generations.promote(partial, target)

    def read() -> None:
        while not done.is_set():
            try:
                seen.append(int(target.read_text()))
            except FileNotFoundError:
                seen.append(-1)

    write(0)
    reader = threading.Thread(target=read)
    reader.start()
    for step in range(1, 200):
        write(step)
    done.set()
    reader.join()
    assert -1 not in seen and seen == sorted(seen)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"last.ckpt": "199", "previous.ckpt": "198"}


def test_without_links_the_last_one_is_renamed(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    generations = Generations()
    for step in range(3):
        (tmp_path / "partial").write_text(str(step))
        generations.promote(tmp_path / "partial", tmp_path / "last.ckpt")
    assert latest(tmp_path).read_text() == "2" and (tmp_path / "previous.ckpt").read_text() == "1"
