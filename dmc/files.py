"""Files of a user: JSON that is not trusted, folders that are replaced at once, and locks against other processes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

RECORD_NAME = "files.json"
"""Lists the names of the other files in a folder that was written here: only these are ever deleted."""
WAIT_BEFORE_WARNING = 60.0
"""Seconds of waiting for a lock after which a warning names its file."""
logger = logging.getLogger(__name__)


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds a mapping.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no JSON, or holds no mapping.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is damaged: brackets are nested too deeply") from None
    except ValueError as error:  # a UnicodeDecodeError is one
        raise ValueError(f"{path} is damaged, or is no JSON file: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a JSON {type(values).__name__}: expected a mapping")
    return values


def json_digest(content: Any) -> str:
    """Return a SHA-256 of JSON content, whatever the order of its keys: caches and unfinished runs know it by this."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Join the keys of nested mappings with dots; an empty mapping stays a value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


@contextmanager
def locked(file: Path, timeout: float = 0) -> Iterator[None]:
    """Hold a lock against other processes; it falls with its process.

    Args:
        file: the lock's file, in an existing folder; it stays when the lock is released.
        timeout: seconds to wait for it; negative: until it is free, after a minute with a warning.
    Raises:
        BlockingIOError: another process holds it still; the message names the file.
    """
    lock = FileLock(file)
    try:
        lock.acquire(timeout=WAIT_BEFORE_WARNING if timeout < 0 else timeout)
    except Timeout:
        held = f"another process holds {file} (if none runs, a killed one or a dead node left it: remove it)"
        if timeout >= 0:
            raise BlockingIOError(held) from None
        logger.warning("%s: waiting for it", held)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def append_line(path: Path, content: str) -> None:
    """Append a line to a file, on the disk at once; a last line that a crash or a full disk has torn stays apart."""
    line = content.encode() + b"\n"
    with path.open("a+b") as file:
        if size := file.seek(0, os.SEEK_END):
            file.seek(size - 1)
            if file.read(1) != b"\n":
                line = b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def written_whole(path: Path, beside: Path | None = None) -> Iterator[Path]:
    """Yield a place to write a file or folder to, which gets the name `path` once it is complete; else it goes.

    A file of that name is replaced; a folder that holds files is not, see `replacement`. Processes that write at the
    same time need a lock, see `locked`, or places of their own.

    Args:
        path: the name.
        beside: the place, on the same disk; None: `.NAME.partial` beside the name. What is there already is removed.
    """
    partial = path.with_name(f".{path.name}.partial") if beside is None else beside
    _remove(partial)
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        _remove(partial)
        raise


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def replacement(
    folder: Path, overwrite: bool, inputs: Iterable[Path] = (), marker: str | None = None
) -> Iterator[Path]:
    """Yield a folder to write into, which replaces `folder` once all is written; after an error nothing is replaced.

    The two hidden names beside it, `.NAME.partial` and `.NAME.retired`, are taken for what a kill has left of this.
    `.NAME.partial.lock` lies there while it is written.

    Raises:
        FileExistsError: see `refuse_occupied`; nothing is written.
        BlockingIOError: another process writes it; nothing is written.
    """
    inputs, name, folder = [*inputs], folder, folder.resolve()  # what a link names is replaced, not the link
    partial, retired = (folder.with_name(f".{folder.name}.{kind}") for kind in ("partial", "retired"))
    refuse_occupied(name, overwrite, inputs, marker)
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = partial.with_name(f"{partial.name}.lock")
    with locked(lock):
        try:
            if partial.is_dir():  # else what is retired was replaced, and a kill came while it was removed
                _restore(folder, retired)
            refuse_occupied(name, overwrite, inputs, marker)
            for rest in (partial, retired):
                shutil.rmtree(rest, ignore_errors=True)
            partial.mkdir()
            try:
                yield partial
                _close(partial)
                refuse_occupied(name, overwrite, inputs, marker)  # writing takes hours: look again
                if folder.exists():
                    folder.rename(retired)
                partial.rename(folder)
            except BaseException:
                _restore(folder, retired)
                shutil.rmtree(partial, ignore_errors=True)
                raise
            shutil.rmtree(retired, ignore_errors=True)
        finally:
            # While it is held: who opened it before finds it without a name, and tries anew.
            lock.unlink(missing_ok=True)


def _close(folder: Path) -> None:
    """List the files of a folder that is written in its record."""
    record = folder / RECORD_NAME
    record.write_text(json.dumps(_names(folder), indent=1) + "\n")
    for weights in folder.rglob("*.safetensors"):  # safetensors writes files that only their owner may read
        weights.chmod(record.stat().st_mode)


def _restore(folder: Path, retired: Path) -> None:
    """Give a folder back its name, where the new one has not taken it."""
    if retired.is_dir() and not folder.exists():
        retired.rename(folder)


def refuse_occupied(folder: Path, overwrite: bool, inputs: Iterable[Path] = (), marker: str | None = None) -> None:
    """Check that `folder` may be written, or replaced.

    Args:
        folder: new, empty, or with `overwrite` one that holds nothing but the files that `replacement` has written.
        overwrite: whether it may be replaced.
        inputs: paths that are read to write it; neither these nor folders that hold them are ever replaced.
        marker: file that every folder of this kind has: one without it, such as a model where a cache is saved, is not
            replaced. None: any kind is.
    Raises:
        FileExistsError: the folder holds other files, of which the message names one, or is of another kind.
    """
    place = folder.resolve()
    if os.path.ismount(place):
        raise FileExistsError(f"{folder} is a mount point, which cannot be replaced: give a folder below it")
    parent = next(path for path in place.parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise FileExistsError(f"{folder} cannot be written: {parent} is a file, or read only; give another output")
    for source in inputs:
        if place == source.resolve() or place in source.resolve().parents:
            raise FileExistsError(f"{folder} is or holds {source}, which is the input: give another output")
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return
    if not overwrite:
        raise FileExistsError(f"{folder} is not empty: give another output, or overwrite=true to replace an export")
    if foreign := _foreign(place, marker):
        raise FileExistsError(f"{folder} {foreign}, and is not replaced: give another output, or remove it by hand")


def _foreign(folder: Path, marker: str | None) -> str | None:
    """Return what a folder holds that its record does not list, or what it lacks, or None."""
    if not folder.is_dir():
        return "is a file"
    try:
        listed = {*json.loads((folder / RECORD_NAME).read_text())}
    except (OSError, ValueError, TypeError):
        return f"holds files but no {RECORD_NAME}, which lists those that were written here"
    others = [name for name in _names(folder) if name not in listed or (folder / name).is_symlink()]
    if others:
        return f"holds {others[0]}, which its {RECORD_NAME} does not list"
    return None if marker is None or marker in listed else f"holds no {marker}, so it is something else"


def _names(folder: Path) -> list[str]:
    """List all files and links below a folder except its record."""
    paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    return sorted(path.relative_to(folder).as_posix() for path in paths if path != folder / RECORD_NAME)
