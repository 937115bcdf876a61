"""Text corpora named in a config: local files, folders and globs, hub datasets."""

from __future__ import annotations

import glob
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset, load_dataset

from dmc.data.files import (
    COMPRESSED,
    KINDS,
    TEXT_SUFFIXES,
    file_stamps,
    kind_of,
    open_rows,
    read_text,
    rows_in_shard,
    texts_in_shard,
)

_CHECKED_ROWS = 100  # json leaves out a column where a row has no value
_LOCAL_SUFFIXES = KINDS.keys() | TEXT_SUFFIXES | COMPRESSED


def _stream_texts(files: list[str]) -> Iterator[dict[str, str]]:
    """Yield whole local files as documents, leaving out those that are not utf-8."""
    for file in files:
        text = read_text(Path(file))
        if text is not None:
            yield {"text": text}


@dataclass(frozen=True)
class TextSource:
    """One text corpus.

    A local text file is one document (any file that is not json, jsonl, parquet, csv or arrow is text); in the other
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
    """Share in a blend, relative to the other sources, > 0."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(
                f"weight={self.weight} of {self.name!r} must be a finite number > 0; leave the source out."
            )
        if self.files is not None:
            files = (self.files,) if isinstance(self.files, str) else tuple(self.files)
            object.__setattr__(self, "files", files)
        if self.is_local and self.split != "train":
            raise ValueError(
                f"split={self.split!r} of the local files {self.name!r}: local files have no splits; "
                "name the files of that split instead (name= or files=)."
            )

    @property
    def label(self) -> str:
        """The name, with the split where there is one."""
        return self.name if self.is_local else f"{self.name}:{self.split}"

    @property
    def is_local(self) -> bool:
        """Whether `name` is a path: it exists, begins like one, is a glob, or ends like a file."""
        path = Path(self.name)
        looks_local = self.name.startswith(("/", "./", "../", "~")) or path.suffix.lower() in _LOCAL_SUFFIXES
        return looks_local or glob.has_magic(self.name) or path.exists()

    def local_files(self) -> list[Path]:
        """Return the local files, sorted.

        Raises:
            FileNotFoundError: nothing matches the name or one of the globs.
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
        found: set[Path] = set()
        for pattern in patterns:
            # A file whose own name holds glob characters is meant literally.
            names = [pattern] if Path(pattern).is_file() else glob.glob(pattern, recursive=True)
            matches = {Path(name) for name in names if Path(name).is_file()}
            if not matches:
                raise FileNotFoundError(f"No file matches {pattern!r}; expected a text, json, jsonl or parquet file.")
            found |= matches
        kinds = {kind_of(path) for path in found}
        if len(kinds) > 1:
            raise ValueError(f"{self.name!r} mixes {sorted(kinds)} files; choose one kind with files='*.jsonl'.")
        return sorted(found)

    def check(self) -> None:
        """Raise a clear error if the documents cannot be read one by one; write nothing.

        Raises:
            FileNotFoundError: no such file, folder or hub dataset.
            ValueError: no document, no such column, or a stream.
            TypeError: the column does not hold text.
        """
        if self.streaming:
            raise ValueError(
                f"{self.name!r} has streaming=True and is never cached; read it with "
                "StreamLoader, or set streaming=False."
            )
        if self._kind() != "text":
            self._open()
        elif not any(path.stat().st_size for path in self.local_files()):
            raise ValueError(f"The corpus {self.label!r} is empty: its files have no bytes.")

    def description(self) -> dict[str, Any]:
        """Return the specification with the sizes and times of local files (the weight changes no document)."""
        specification = asdict(self)
        del specification["weight"], specification["streaming"]
        if self.is_local:
            specification["stamps"] = file_stamps(self.local_files())
        return specification

    def num_bytes(self) -> int:
        """Return the size of the local files, or of the hub dataset's rows in memory."""
        if self.is_local:
            return sum(path.stat().st_size for path in self.local_files())
        return self._hub_rows.data.nbytes

    def documents(self, shard: int = 0, num_shards: int = 1) -> Iterator[str | None]:
        """Yield each document's text, None for a file that is not utf-8.

        Args:
            shard: the part that is read, 0 <= shard < num_shards.
            num_shards: parts of about equal size; one behind the other they are all documents.
        """
        if self._kind() == "text":
            yield from texts_in_shard(self.local_files(), shard, num_shards)
            return
        if self.is_local:
            rows: Iterable[dict[str, Any]] = rows_in_shard(self.local_files(), shard, num_shards)
        else:
            first, last = (len(self._hub_rows) * bound // num_shards for bound in (shard, shard + 1))
            # select refuses an empty range at the end
            rows = self._hub_rows.select_columns([self.column]).select(range(first, last)) if first < last else ()
        with self._naming_the_corpus():
            yield from map(self._text_of, rows)

    def stream(self) -> IterableDataset:
        """Open the documents as a resumable stream of `{"text": ...}` rows; files are its shards."""
        if self._kind() == "text":
            files = [str(path) for path in self.local_files()]
            return IterableDataset.from_generator(_stream_texts, gen_kwargs={"files": files})
        if not (self.is_local or self.streaming):
            raise ValueError(f"{self.name!r} has streaming=False; set streaming=True to stream it from the hub.")
        stream = self._open().select_columns([self.column])
        return stream if self.column == "text" else stream.rename_column(self.column, "text")

    def _kind(self) -> str:
        """Return the kind of the local files (text, json, parquet, ...), or "hub"."""
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

    @contextmanager
    def _naming_the_corpus(self) -> Iterator[None]:
        """Name the corpus in the error where a file is not of the kind that its name says."""
        try:
            yield
        except ValueError as error:
            raise ValueError(
                f"{self.label!r} cannot be read as {self._kind()} ({error}); repair the file or leave it out."
            ) from error

    def _open(self) -> Dataset | IterableDataset:
        """Open the rows once the first of them prove that they hold text."""
        files = [path for path in self.local_files() if path.stat().st_size] if self.is_local else []
        if self.is_local and not files:
            raise ValueError(f"The corpus {self.label!r} is empty: its files have no bytes.")
        with self._naming_the_corpus():
            first = list(islice(rows_in_shard(files, 0, 1) if files else self._hub_rows, _CHECKED_ROWS))
        if not first:
            raise ValueError(f"The corpus {self.label!r} is empty: no rows. Check its path and split.")
        columns = sorted(set().union(*first))
        if self.column not in columns:
            raise ValueError(f"{self.label!r} has no column {self.column!r}; it has {columns}. Set column=.")
        for row in first:
            self._text_of(row)
        return open_rows(files) if files else self._hub_rows

    def _text_of(self, row: dict[str, Any]) -> str:
        """Return the row's text, "" for a missing value (skipped as empty)."""
        text = row.get(self.column)
        if text is not None and not isinstance(text, str):
            raise TypeError(
                f"Column {self.column!r} of {self.label!r} holds {type(text).__name__}, expected text; set column=."
            )
        return text or ""
