"""What defines a cell: models by their files, policies and tasks by their options, documents and own code."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file, extract_commit_hash

from dmc.data import DocumentSource
from dmc.data.sources import file_stamps

MODEL_FILES = {".safetensors", ".bin", ".json", ".model", ".txt", ".jinja"}
"""File types that identify a model: weights, configuration, tokenizer and chat template, but no README."""


def identity_of(value: Any, *without: str, settings: Any = None) -> Any:
    """Return what defines an object, as JSON content.

    Options that have their default value are left out, so that a new option leaves the identity of all that do not use
    it as it is; raise `grid.FORMAT` when a default changes.

    Args:
        value: an object, or plain content, which is returned as it is.
        without: names of options that do not count.
        settings: what the object was built from, which stands for one that is no dataclass.
    Returns:
        Its class and options, the documents of a source, and a hash of the files of a user's own class.
    Raises:
        ValueError, FileNotFoundError: the documents of a source are not there.
    """
    if isinstance(value, DocumentSource):
        value.check()
        return value.description()
    if isinstance(value, (list, tuple)):
        return [identity_of(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str, Mapping)):
        return value
    kind, given, options = type(value), settings if isinstance(settings, Mapping) else {}, dict[str, Any]()
    for each in fields(value) if is_dataclass(value) else ():
        default = each.default if each.default_factory is MISSING else each.default_factory()
        own = identity_of(getattr(value, each.name), settings=given.get(each.name))
        if each.init and each.name not in without and own != identity_of(default):
            options[each.name] = own
    files = [path for each in kind.__mro__ if (path := _own_file(each)) is not None]
    code = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8] if files else ""
    return [kind.__qualname__, code, options if is_dataclass(value) else given or str(value)]


def options_of(value: Any, *without: str) -> dict[str, Any]:
    """Return all options of a dataclass, those by default too, as JSON content; empty for other objects."""
    named = [each.name for each in fields(value) if each.init] if is_dataclass(value) else []
    return {name: identity_of(getattr(value, name)) for name in named if name not in without}


def _own_file(kind: type) -> Path | None:
    """Find the file of a user's own class."""
    package = kind.__module__.partition(".")[0]
    path = getattr(sys.modules[kind.__module__], "__file__", None)
    return None if path is None or package == "dmc" or package in sys.stdlib_module_names else Path(path)


def model_files(path: str, revision: str | None) -> list[Any]:
    """Return the names, sizes and times of the files of a model's folder, or the hub's name and commit."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return file_stamps(each for each in sorted(folder.glob("*")) if each.suffix in MODEL_FILES)
    return [path, extract_commit_hash(cached_file(path, "config.json", revision=revision), None)]
