"""Files of a user: JSON that is not trusted, and folders that are replaced at once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dmc.checksums import file_damage, read_list, write_list

RECORD_NAME = "files.json"
"""Lists every other file of a folder written here, with its bytes and its CRC-32."""


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


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Join the keys of nested mappings with dots; an empty mapping stays a value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


@contextmanager
def replacement(folder: Path, overwrite: bool, inputs: Iterable[Path] = ()) -> Iterator[Path]:
    """Yield a folder to write into, which replaces `folder` once all is written; after an error nothing is replaced.

    Raises:
        FileExistsError: see `refuse_occupied`; nothing is written.
    """
    named, folder = folder, folder.resolve()  # the folder that a link names is replaced, not the link
    partial, retired = _beside(folder, "partial"), _beside(folder, "retired")
    if partial.is_dir():  # else a folder aside is what a finished replacement could not remove
        _restore(folder, retired)
    refuse_occupied(named, overwrite, inputs)
    _remove(partial)
    _remove(retired)
    partial.mkdir(parents=True)
    write_list(partial / RECORD_NAME, [])  # marks the rest as ours after a kill
    try:
        yield partial
        write_list(partial / RECORD_NAME, _files(partial))
        refuse_occupied(folder, overwrite, inputs, thoroughly=False)  # writing takes hours: look again
        if folder.exists():
            folder.rename(retired)
        partial.rename(folder)
    except BaseException:
        _restore(folder, retired)
        _remove(partial)
        raise
    _remove(retired)


def _restore(folder: Path, retired: Path) -> None:
    """Give a folder that was put aside its name back, where none has taken it."""
    if not os.path.lexists(folder) and not retired.is_symlink() and (retired / RECORD_NAME).is_file():
        retired.rename(folder)


def _remove(folder: Path) -> None:
    """Remove a folder, its record last: after a kill the rest is still marked as ours."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name != RECORD_NAME:
            with suppress(OSError):  # the new folder is written: a failed removal is no error
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def refuse_occupied(folder: Path, overwrite: bool, inputs: Iterable[Path] = (), thoroughly: bool = True) -> None:
    """Check that `folder` may be written, or replaced.

    Args:
        folder: new, empty, or with `overwrite` one whose files are all as its own record lists them.
        overwrite: whether it may be replaced.
        inputs: paths that are read to write it; neither these nor folders that hold them are ever replaced.
        thoroughly: whether to compare checksums too; False: names and sizes.
    Raises:
        FileExistsError: the folder holds other files; the message names one.
    """
    named, folder = folder, folder.resolve()
    parent = next(each for each in folder.parents if each.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise FileExistsError(f"{named} cannot be written: {parent} is a file, or read only; give another output")
    for source in inputs:
        if folder == source.resolve() or folder in source.resolve().parents:
            raise FileExistsError(f"{named} is or holds {source}, which is the input: give another output")
    for place in (_beside(folder, "partial"), _beside(folder, "retired")):
        if place.is_symlink() or (_occupied(place) and not (place / RECORD_NAME).is_file()):
            raise FileExistsError(f"{place} is in the way of writing {named}: move it, or give another output")
    if not _occupied(folder):
        return
    if not overwrite:
        raise FileExistsError(f"{named} is not empty: give another output, or overwrite=true to replace an export")
    foreign = _foreign(folder, thoroughly)
    if foreign is not None:
        raise FileExistsError(f"{named} {foreign}, and is not replaced: give another output, or remove it by hand")


def _occupied(folder: Path) -> bool:
    return os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir() or any(folder.iterdir()))


def _foreign(folder: Path, thoroughly: bool) -> str | None:
    """Return what a folder holds that its record does not list, or None."""
    if not folder.is_dir():
        return "is a file"
    try:
        listed = read_list(folder / RECORD_NAME)
    except ValueError:
        return f"holds files but no {RECORD_NAME}, in which this version lists the files that it writes"
    for path in _files(folder):
        name = path.relative_to(folder).as_posix()
        if name not in listed or path.is_symlink():
            return f"holds {name}, which its {RECORD_NAME} does not list"
        num_bytes, checksum = listed[name]
        if file_damage(path, num_bytes, checksum if thoroughly else None):
            return f"holds {name}, which has changed since it was exported"
    return None


def _files(folder: Path) -> list[Path]:
    """List all files and links below a folder except its record."""
    found = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    return sorted(path for path in found if path != folder / RECORD_NAME)


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}")
