"""Copies of what the hub holds: who fetches them, and who waits for whom."""

import pytest

from dmc.data import hub

NAME = "someone/model"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return how a process of a machine asks for a copy; a process that waits for another fails instead."""

    def refuse(_):
        raise AssertionError("it waits")

    def local_copy(local_rank, fetched):
        def snapshot_download(name, **_):
            if fetched is None:
                raise OSError("there is no network")
            fetched.mkdir(exist_ok=True)
            return str(fetched)

        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
        return hub.local_copy(NAME)

    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub.time, "sleep", refuse)
    return local_copy


def test_a_copy_is_fetched_once_by_the_first_process(machine, tmp_path):
    with pytest.raises(AssertionError, match="it waits"):
        machine(1, tmp_path / "never")
    copy = str(tmp_path / "copy")
    assert machine(0, tmp_path / "copy") == machine(1, tmp_path / "never") == machine(0, tmp_path / "never") == copy


def test_where_the_first_process_finds_nothing_the_others_do_not_wait(machine, tmp_path):
    assert machine(0, None) == machine(1, None) == NAME
    copy = str(tmp_path / "copy")
    assert machine(0, tmp_path / "copy") == machine(1, None) == copy


def test_an_emptied_cache_is_filled_again_by_the_first_process(machine, tmp_path):
    machine(0, tmp_path / "copy")
    (tmp_path / "copy").rmdir()
    with pytest.raises(AssertionError, match="it waits"):
        machine(1, tmp_path / "never")
    assert machine(0, tmp_path / "again") == machine(1, tmp_path / "never") == str(tmp_path / "again")
