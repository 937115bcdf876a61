"""Folders are replaced at once and never with files of others in them; a lock falls with its process."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dmc.files import RECORD_NAME, json_digest, locked, replacement, written_whole


def write_model(folder, text, overwrite=True):
    with replacement(folder, overwrite) as partial:
        (partial / "weights").write_text(text)


def files_in(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def add_thesis(folder):
    (folder / "thesis.txt").write_text("years of work")


def add_thesis_below(folder):
    (folder / "chapters" / "one").mkdir(parents=True)
    add_thesis(folder / "chapters" / "one")


def link_to_elsewhere(folder):
    (folder / "data").symlink_to(folder.parent)


def link_instead_of_file(folder):
    (folder / "weights").rename(folder.parent / "notes.md")
    (folder / "weights").symlink_to(folder.parent / "notes.md")


def forget_the_record(folder):
    (folder / RECORD_NAME).unlink()


def list_no_files(folder):
    (folder / RECORD_NAME).write_text("[]")


@pytest.mark.parametrize(
    "change",
    [add_thesis, add_thesis_below, link_to_elsewhere, link_instead_of_file, forget_the_record, list_no_files],
)
@pytest.mark.parametrize("through_a_link", [False, True])
def test_a_folder_with_files_of_others_is_never_replaced(change, through_a_link, tmp_path):
    folder = output = tmp_path / "place" / "model"
    write_model(folder, "1")
    change(folder)
    if through_a_link:
        output = tmp_path / "link"
        output.symlink_to(folder)
    before = files_in(tmp_path)
    with pytest.raises(FileExistsError, match="is not replaced: give another output, or remove it by hand"):
        write_model(output, "2")
    with pytest.raises(FileExistsError, match="is not empty: give another output, or overwrite=true"):
        write_model(output, "2", overwrite=False)
    assert files_in(tmp_path) == before


def test_a_thesis_that_appears_while_the_folder_is_written_stays(tmp_path):
    folder = tmp_path / "model"
    write_model(folder, "1")
    with pytest.raises(FileExistsError, match=r"holds thesis.txt"), replacement(folder, overwrite=True):
        add_thesis(folder)
    assert (folder / "weights").read_text() == "1" and (folder / "thesis.txt").read_text() == "years of work"


def test_inputs_and_files_are_never_replaced(tmp_path):
    write_model(tmp_path / "model", "1")
    for folder in (tmp_path / "model", tmp_path):
        with (
            pytest.raises(FileExistsError, match="which is the input"),
            replacement(folder, True, [tmp_path / "model"]),
        ):
            raise AssertionError
    with pytest.raises(FileExistsError, match="is a file"):
        write_model(tmp_path / "model" / "weights", "2")
    with pytest.raises(FileExistsError, match="is a file, or read only"):
        write_model(tmp_path / "model" / "weights" / "below", "2")
    assert files_in(tmp_path)["model/weights"] == b"1"


def test_a_folder_of_another_kind_is_never_replaced(tmp_path):
    with replacement(tmp_path / "model", overwrite=False, marker="weights") as partial:
        (partial / "weights").write_text("1")
    with (
        pytest.raises(FileExistsError, match=r"model holds no cache.json, so it is something else, and is not"),
        replacement(tmp_path / "model", overwrite=True, marker="cache.json"),
    ):
        raise AssertionError
    assert files_in(tmp_path)["model/weights"] == b"1"
    write_model(tmp_path / "model", "2")


def test_a_linked_folder_is_replaced_where_it_lies(tmp_path):
    write_model(tmp_path / "place" / "model", "1")
    (tmp_path / "link").symlink_to(tmp_path / "place" / "model")
    write_model(tmp_path / "link", "2")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "place" / "model" / "weights").read_text() == "2"


def test_weights_may_be_read_by_whom_the_umask_lets_read(tmp_path):
    with replacement(tmp_path / "final", overwrite=False) as partial:
        save_file({"weight": torch.ones(1)}, partial / "model.safetensors")
        (partial / "config.json").write_text("{}")
    modes = {path.stat().st_mode for path in (tmp_path / "final").iterdir()}
    assert len(modes) == 1


@pytest.mark.parametrize("kind", ["partial", "retired"])
def test_a_link_beside_the_folder_leads_to_no_delete(kind, tmp_path):
    write_model(tmp_path / "other", "1")
    (tmp_path / f".model.{kind}").symlink_to(tmp_path / "other")
    try:
        write_model(tmp_path / "model", "2")
        write_model(tmp_path / "model", "3")
    except OSError as error:
        print(error)
    assert files_in(tmp_path / "other")["weights"] == b"1"


def test_a_folder_that_cannot_take_its_name_leaves_the_earlier_one(tmp_path, monkeypatch):
    write_model(tmp_path / "model", "1")
    plain = Path.rename

    def rename(self, target):
        if self.name == ".model.partial":
            raise OSError("no such device")
        return plain(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(OSError, match="no such device"):
            write_model(tmp_path / "model", "2")
    assert (tmp_path / "model" / "weights").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("beside", [None, "own"])
def test_a_file_or_folder_gets_its_name_once_it_is_whole(beside, tmp_path):
    place = None if beside is None else tmp_path / beside
    (tmp_path / "notes").write_text("1")
    (tmp_path / (beside or ".notes.partial")).write_text("what a kill has left")
    with pytest.raises(UnicodeEncodeError), written_whole(tmp_path / "notes", place) as partial:
        partial.write_text("2\ud800", encoding="utf-8")
    assert files_in(tmp_path) == {"notes": b"1"}
    with written_whole(tmp_path / "notes", place) as partial:
        partial.write_text("2")
        assert (tmp_path / "notes").read_text() == "1"
    with written_whole(tmp_path / "folder", place) as partial:
        partial.mkdir()
        (partial / "weights").write_text("3")
    assert files_in(tmp_path) == {"notes": b"2", "folder/weights": b"3"}
    with pytest.raises(OSError, match="not empty"), written_whole(tmp_path / "folder", place) as partial:
        partial.mkdir()
    assert files_in(tmp_path) == {"notes": b"2", "folder/weights": b"3"} and len([*tmp_path.iterdir()]) == 2


def replace_and_die(folder, number):
    """Replace a folder, and be killed at the `number`th of its steps on the disk."""
    steps = [number]

    def count(plain):
        def step(*arguments, **options):
            steps[0] -= 1
            if steps[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*arguments, **options)

        return step

    for name in ("mkdir", "rename", "write_text"):
        setattr(Path, name, count(getattr(Path, name)))
    os.unlink, os.rmdir = count(os.unlink), count(os.rmdir)  # what rmtree calls
    write_model(folder, "2")


def test_a_kill_at_any_moment_leaves_the_old_folder_or_the_new_one(tmp_path):
    killed, number = True, 0
    while killed:
        number += 1
        folder = tmp_path / str(number) / "model"
        write_model(folder, "1")
        process = multiprocessing.get_context("fork").Process(target=replace_and_die, args=(folder, number))
        process.start()
        process.join()
        killed = process.exitcode == -signal.SIGKILL
        with pytest.raises(ZeroDivisionError), replacement(folder, overwrite=True):  # the next start, which fails
            print(1 // 0)
        assert (folder / "weights").read_text() in ("1", "2")
        write_model(folder, "3")
        assert (folder / "weights").read_text() == "3" and [path.name for path in folder.parent.iterdir()] == ["model"]
    assert number > 8 and process.exitcode == 0


def write_until_killed(folder, ready):
    with replacement(folder, overwrite=True) as partial:
        (partial / "weights").write_text("2")
        ready.set()
        time.sleep(600)


def test_a_folder_that_another_process_writes_is_refused_before_anything_is_written(tmp_path):
    folder, context = tmp_path / "place" / "model", multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=write_until_killed, args=(folder, ready), daemon=True)
    process.start()
    assert ready.wait(60)
    before = files_in(tmp_path)
    with pytest.raises(BlockingIOError, match=r"another process holds .*\.model\.partial\.lock"):
        write_model(folder, "3")
    assert files_in(tmp_path) == before
    process.kill()
    process.join()
    write_model(folder, "3")
    assert files_in(tmp_path)["place/model/weights"] == b"3"
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_mount_point_which_cannot_take_another_name_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path) == tmp_path / "disk")
    with pytest.raises(FileExistsError, match="is a mount point"), replacement(tmp_path / "disk", overwrite=True):
        raise AssertionError
    write_model(tmp_path / "disk" / "model", "1")
    assert files_in(tmp_path)["disk/model/weights"] == b"1"


def hold(file, ready):
    with locked(file):
        ready.set()
        time.sleep(600)


def test_a_lock_is_refused_by_name_until_its_process_is_killed(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, file = context.Event(), tmp_path / "lock"
    process = context.Process(target=hold, args=(file, ready))
    process.start()
    assert ready.wait(60)
    with pytest.raises(BlockingIOError, match=f"another process holds {file} .*: remove it"), locked(file):
        raise AssertionError
    process.kill()
    process.join()
    for timeout in (0, -1):
        with locked(file, timeout):
            pass


def test_a_start_that_waits_for_a_lock_says_for_which_and_gets_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("dmc.files.WAIT_BEFORE_WARNING", 0.05)
    context = multiprocessing.get_context("fork")
    ready, file = context.Event(), tmp_path / "lock"
    process = context.Process(target=hold, args=(file, ready))
    process.start()
    assert ready.wait(60)
    monkeypatch.setattr("dmc.files.logger.warning", lambda *_: process.kill())
    with locked(file, timeout=-1):
        process.join()


def test_hashes_that_caches_and_unfinished_runs_have_stored_stay():
    content = {"b": [1, 2.5, None], "a": {"path": Path("x"), "é": True}}
    recorded = "519aff9e807c458d7ae1a7b4ad0863be4da7ed3ac7ee733eb90b69141cd5688e"
    assert json_digest(content) == json_digest(dict(reversed(content.items()))) == recorded
