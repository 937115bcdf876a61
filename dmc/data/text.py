"""Text corpora named in a config: local files, folders and globs, hub datasets."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import IterableDataset, load_dataset

from dmc.data.sources import (
    COMPRESSED,
    DAMAGE,
    KINDS,
    TEXT_SUFFIXES,
    Document,
    DocumentSource,
    damage_of,
    file_stamps,
    files_digest,
    kind_of,
    stream_rows,
    stream_texts,
)
from dmc.files import json_digest

_CHECKED_ROWS = 100
_HUB_SHARD = 2**26  # bytes of a downloaded dataset that make up a shard
_LOCAL_SUFFIXES = KINDS.keys() | TEXT_SUFFIXES | COMPRESSED.keys()


@dataclass(frozen=True)
class TextSource(DocumentSource):
    """One corpus of text, or of chats or instructions, of which only the answers are trained on.

    A local text file is one document (any file that is not json, jsonl, parquet or csv is text); in the other
    formats and on the hub a document is one row. Local files have no splits: give each split its own files.
    """

    name: str
    """A file, a folder (read recursively), a glob, or the name of a dataset on the hub."""
    files: str | Sequence[str] | None = None
    """Globs inside the folder or hub repository `name`; None: all its files."""
    subset: str | None = None
    """Configuration name of a hub dataset."""
    split: str = "train"
    """Split of a hub dataset; slices such as `train[:5%]` work where `streaming` is False."""
    column: str = "text"
    """Column that holds the text; not used for text files."""
    revision: str | None = None
    """Commit, tag or branch of a hub dataset; pin it, or a changed dataset keeps its cached tokens."""
    streaming: bool = False
    """Read a hub dataset without downloading it first; required by `StreamLoader`, refused by `build_packed`."""
    weight: float = 1.0
    messages: str | None = None
    """Column that holds chats, lists of `{role, content}`, for the tokenizer's chat template: read instead of text."""
    prompt: str | None = None
    """Column that holds prompts, with `completion`: read instead of text."""
    completion: str | None = None
    """Column that holds their completions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.files is not None:
            files = (self.files,) if isinstance(self.files, str) else tuple(self.files)
            object.__setattr__(self, "files", files)
        if self.is_local and self.split != "train":
            raise ValueError(
                f"split={self.split!r} of the local files {self.name!r}: local files have no splits; "
                "name the files of that split instead (name= or files=)."
            )
        if (self.prompt is None) != (self.completion is None) or (self.messages and self.prompt):
            raise ValueError(
                f"messages={self.messages!r}, prompt={self.prompt!r}, completion={self.completion!r} of {self.name!r}: "
                "give messages=, or prompt= and completion=, or neither for text."
            )

    @property
    def label(self) -> str:
        """The name, with the split where there is one."""
        return self.name if self.is_local else f"{self.name}:{self.split}"

    @property
    def has_loss_mask(self) -> bool:
        """Whether only answers are trained on."""
        return self._columns != [self.column]

    @property
    def is_local(self) -> bool:
        """Whether `name` is a path: it exists, begins like one, is a glob, or ends like a file."""
        path = Path(self.name)
        looks_local = self.name.startswith(("/", "./", "../", "~")) or path.suffix.lower() in _LOCAL_SUFFIXES
        return looks_local or glob.has_magic(self.name) or path.exists()

    @property
    def is_remote(self) -> bool:
        """Whether the documents are on the hub."""
        return not self.is_local

    def local_files(self) -> list[Path]:
        """Return the local files, sorted.

        Raises:
            FileNotFoundError: no file matches the name or one of the globs.
            ValueError: `files` given for something that is not a folder, or files of several formats.
        """
        root = Path(self.name).expanduser()
        if root.is_dir():
            patterns = [str(root / pattern) for pattern in self.files or ("**/*",)]
        elif self.files is not None:
            raise ValueError(
                f"files={list(self.files)} needs a folder or a hub dataset; name={self.name!r} is neither."
            )
        else:
            patterns = [str(root)]
        paths: set[Path] = set()
        for pattern in patterns:
            # A file whose own name holds glob characters is meant literally.
            names = [pattern] if Path(pattern).is_file() else glob.glob(pattern, recursive=True)
            matches = {Path(name) for name in names if Path(name).is_file()}
            if not matches:
                raise FileNotFoundError(f"No file matches {pattern!r}; expected a text, json, jsonl or parquet file.")
            paths |= matches
        kinds = {kind_of(path) for path in paths}
        if len(kinds) > 1:
            raise ValueError(f"{self.name!r} mixes {sorted(kinds)} files; choose one kind with files='*.jsonl'.")
        return sorted(paths)

    def check(self) -> None:
        """Raise a clear error if the first documents cannot be read; write nothing.

        Raises:
            FileNotFoundError: no such file, folder or hub dataset.
            ValueError: no document, no such column, or a stream.
            TypeError: the column does not hold text, chats or prompts.
        """
        if self.streaming:
            raise ValueError(f"{self.name!r} has streaming=True and cannot be cached: set data.streaming=true.")
        self._check_rows()

    def description(self) -> dict[str, Any]:
        """Return the specification with the sizes and times of local files (the weight changes no document)."""
        specification = asdict(self)
        del specification["weight"], specification["streaming"]
        if self.is_local:
            specification["stamps"] = file_stamps(self.local_files())
        if self.messages is not None and self._kind != "json":
            specification["nulls"] = "left out"  # older caches of these chats hold them
        return specification

    def digest(self) -> str:
        """Return a hash of the local files, or of the first documents on the hub."""
        if self.is_local:
            return files_digest(self.local_files())
        first = list(islice(self.read(self._rows()), _CHECKED_ROWS))
        return json_digest(first)

    def num_bytes(self) -> int:
        """Return the size of the local files, or of the hub dataset's rows in memory."""
        if self.is_local:
            return sum(path.stat().st_size for path in self.local_files())
        return self._hub_rows.data.nbytes

    def documents(self) -> Iterator[str | None]:
        """See `DocumentSource`; the first rows prove first that there are documents."""
        self._check_rows()
        yield from super().documents()

    def stream(self) -> IterableDataset:
        """Open the rows as a resumable stream."""
        with self._naming_damage():
            rows = self._rows()
        is_plain = self._kind == "text" or rows.column_names is None
        return rows if is_plain else rows.select_columns(self._columns)

    def read(self, rows: Iterable[dict[str, Any]]) -> Iterator[Document]:
        """Yield the document of each row, empty where a value is missing.

        Raises:
            TypeError: a column has another type.
            ValueError: a file's content does not match its name.
        """
        with self._naming_damage():
            for row in rows:
                yield self._document(row) if self._kind != "text" else row["text"]

    @contextmanager
    def _naming_damage(self) -> Iterator[None]:
        """Name the file that cannot be read."""
        try:
            yield
        except DAMAGE as error:
            if not self.is_local and not isinstance(error, ValueError):  # of the network
                raise
            reason = (
                damage_of(self.local_files(), error, self._columns) if self.is_local and self._kind != "text" else error
            )
            raise ValueError(
                f"{self.label!r} cannot be read as {self._kind} ({reason}); repair the file or leave it out."
            ) from error

    @property
    def _columns(self) -> list[str]:
        """The columns that make up a document."""
        if self.messages is not None:
            return [self.messages]
        return [self.column] if self.prompt is None or self.completion is None else [self.prompt, self.completion]

    @cached_property
    def _kind(self) -> str:
        """The kind of the local files (text, json, parquet, ...), or "hub"."""
        return kind_of(self.local_files()[0]) if self.is_local else "hub"

    @cached_property
    def _hub_rows(self) -> Any:
        try:
            return load_dataset(
                self.name,
                self.subset,
                data_files=list(self.files) if self.files else None,
                split=self.split,
                revision=self.revision,
                streaming=self.streaming,
            )
        except OSError as error:
            raise FileNotFoundError(
                f"{self.name!r} is neither a local file, folder or glob nor a dataset the hub returns "
                f"({type(error).__name__}: {error}). Check the spelling and the network, or give the path of a copy."
            ) from error

    def _rows(self) -> IterableDataset:
        if self.is_local:
            files = self.local_files()
            return stream_texts(files) if self._kind == "text" else stream_rows(files, self._columns)
        if self.streaming:
            return self._hub_rows
        num_shards = min(len(self._hub_rows), 1 + self._hub_rows.data.nbytes // _HUB_SHARD)
        return self._hub_rows.to_iterable_dataset(num_shards=max(1, num_shards))

    def _check_rows(self) -> None:
        """Read the first rows, of which json leaves out a column that has no value."""
        if self.is_local and not self.num_bytes():
            raise ValueError(f"The corpus {self.label!r} is empty: its files have no bytes.")
        if self._kind == "text":
            if self.has_loss_mask:
                raise ValueError(f"{self.name!r} holds text files, which have no columns {self._columns}.")
            return
        columns: set[str] = set()

        def first_rows() -> Iterator[dict[str, Any]]:
            for row in islice(self._rows(), _CHECKED_ROWS):
                columns.update(row)
                yield row

        if not sum(1 for _ in self.read(first_rows())):
            raise ValueError(f"The corpus {self.label!r} is empty: no rows. Check its path and split.")
        for column in self._columns:
            if column not in columns:
                raise ValueError(f"{self.label!r} has no column {column!r}; it has {sorted(columns)}. Set column=.")

    def _document(self, row: dict[str, Any]) -> Document:
        values = [row.get(column) for column in self._columns]
        expected, example = (str, "text") if self.messages is None else (list, "a list of messages")
        for column, value in zip(self._columns, values, strict=True):
            if value is not None and not isinstance(value, expected):
                kind = type(value).__name__
                raise TypeError(f"Column {column!r} of {self.label!r} holds {kind}, expected {example}; set column=.")
        if self.messages is not None:
            return (values[0] or []) if self._kind == "json" else without_nulls(values[0] or [])
        return (values[0] or "", values[1] or "") if self.completion is not None else values[0] or ""


def without_nulls(value: Any) -> Any:
    """Leave out what mappings hold no value for: Arrow gives every one of a column the keys of all the others."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value
