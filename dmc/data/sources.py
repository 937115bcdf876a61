"""Sources of documents: their interface, and local files read as streams of rows.

A stream is an `IterableDataset`: its shards are files, ranges of lines of a json file, or row groups of a parquet file,
in the documents' order, so that any part can be read alone and its position saved.
"""

from __future__ import annotations

import bisect
import codecs
import hashlib
import itertools
import json
import lzma
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pandas
from datasets import Features, IterableDataset, Value, load_dataset
from fsspec.compression import available_compressions
from pyarrow import parquet

from dmc.data.packing import TokenTable
from dmc.files import json_digest

JSON_LINES_SHARD = 2**26
"""Bytes of a jsonl file per shard."""
DIGESTED_BYTES = 2**26
"""Bytes of a source that are hashed to identify it; all of a smaller source."""
_BLOCK_BYTES = 2**16
DAMAGE = (ValueError, EOFError, OSError, lzma.LZMAError, zlib.error)
"""What readers raise of files that are damaged, cut short, or not what their names say."""
COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".xz": "xz", ".bz2": "bz2"}
"""Compressions by the ends of names, as fsspec calls them."""
TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py", ".tex", ".html"}
KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}

Chat = list[dict[str, Any]]
Document = str | Chat | tuple[str, ...] | None
"""A text, a chat, or prompts and completions in turn, of which completions are learned; None: it cannot be decoded."""


class DocumentSource:
    """Base of all sources of text; a subclass implements the members that raise here, and must be picklable."""

    weight: float
    """Share in a blend, relative to the other sources, > 0."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight={self.weight} of {self.label!r} must be a finite number > 0; or leave it out.")

    @property
    def label(self) -> str:
        """A few letters for messages and file names."""
        raise NotImplementedError

    @property
    def has_loss_mask(self) -> bool:
        """Whether some tokens are read but not trained on, such as a user's turns in a chat."""
        return False

    @property
    def is_remote(self) -> bool:
        """Whether reading the documents asks for a network, or a copy in the cache of `datasets`."""
        return False

    def check(self) -> None:
        """Raise a clear error if the documents cannot be read; write nothing."""
        raise NotImplementedError

    def description(self) -> dict[str, Any]:
        """Return what identifies the documents (specification, file sizes and times), for the cache's key."""
        raise NotImplementedError

    def digest(self) -> str:
        """Return a hash of the documents, independent of their location: a run continues only with the same."""
        return json_digest(self.description())

    def open_tokens(self, vocab_size: int) -> TokenTable | None:
        """Open documents that are tokens already, of a vocabulary of so many; None: they are text."""
        return None

    def check_ids(self, vocab_size: int, cache_folder: Path) -> None:
        """Raise a clear error if documents that are tokens already have others than a vocabulary of so many."""
        return None

    def num_bytes(self) -> int:
        """Return the approximate size of the documents; the same for the same description."""
        raise NotImplementedError

    def stream(self) -> IterableDataset:
        """Open the rows that hold the documents, always in the same order."""
        raise NotImplementedError

    def read(self, rows: Iterable[dict[str, Any]]) -> Iterator[Document]:
        """Yield the document of each row of the stream."""
        return (row["text"] for row in rows)

    def documents(self) -> Iterator[str | None]:
        """Yield each document as one text, None for one that cannot be decoded."""
        for document in self.read(self.stream()):
            if isinstance(document, list):
                yield "\n".join(map(text_of, document))
            else:
                yield "".join(document) if isinstance(document, tuple) else document


def text_of(message: dict[str, Any]) -> str:
    """Return what a message of a chat says; a list of parts is read as their texts, one behind the other.

    Raises:
        TypeError: the content is neither text nor a list of parts of text, such as an image.
    """
    content = message.get("content")
    if not isinstance(content, list):
        content = [{"text": "" if content is None else content}]
    texts = []
    for part in content:
        kind, text = (part.get("type", "text"), part.get("text")) if isinstance(part, dict) else ("text", part)
        if kind != "text" or not isinstance(text, str):
            raise TypeError(f"its content holds {(kind if kind != 'text' else type(text).__name__)!r}, expected text")
        texts.append(text)
    return "".join(texts)


def kind_of(path: Path) -> str:
    """Return json, parquet, csv, arrow or text, by the file's name."""
    suffixes = path.suffixes
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes = suffixes[:-1]
    return KINDS.get(suffixes[-1].lower(), "text") if suffixes else "text"


def file_stamps(paths: Iterable[Path], relative_to: Path | None = None) -> list[list[Any]]:
    """Return [path, size in bytes, modification time in ns] of each file."""
    stamps: list[list[Any]] = []
    for path in paths:
        status = path.stat()
        name = path.relative_to(relative_to) if relative_to else path.resolve()
        stamps.append([name.as_posix(), status.st_size, status.st_mtime_ns])
    return stamps


def files_digest(paths: Sequence[Path]) -> str:
    """Return a hash of files' sizes and content; beyond `DIGESTED_BYTES`, of evenly spread blocks of the content."""
    sizes = [path.stat().st_size for path in paths]
    starts = [0, *itertools.accumulate(sizes)]
    spans = [(path, 0, size) for path, size in zip(paths, sizes, strict=True)]
    if starts[-1] > DIGESTED_BYTES:
        num_blocks = DIGESTED_BYTES // _BLOCK_BYTES
        places = [starts[-1] * block // num_blocks for block in range(num_blocks)]
        numbers = [bisect.bisect_right(starts, place) - 1 for place in places]
        spans = [(paths[n], place - starts[n], _BLOCK_BYTES) for n, place in zip(numbers, places, strict=True)]
    digest = hashlib.sha256(str(sizes).encode())
    for path, start, size in spans:
        with path.open("rb") as file:
            file.seek(start)
            digest.update(file.read(size))
    return digest.hexdigest()


def read_text(path: Path) -> str | None:
    """Return a file's text, or None if it is not utf-8 (a byte order mark is dropped)."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def stream_texts(files: Sequence[Path]) -> IterableDataset:
    """Stream files as rows of `{"text": ...}`, None for one that is not utf-8."""
    return IterableDataset.from_generator(_texts, gen_kwargs={"files": [str(path) for path in files]})


def stream_rows(files: Sequence[Path], columns: Sequence[str] = ()) -> IterableDataset:
    """Stream the rows of json, parquet, csv or arrow files without writing a copy to a cache.

    Args:
        files: files of one kind.
        columns: those that are read; only those need be alike in all parquet files. Empty: all.
    """
    kind = kind_of(files[0])
    if kind == "json":
        spans = [(str(path), start) for path in files for start in _starts(path)]
        return IterableDataset.from_generator(_json_rows, gen_kwargs={"spans": spans})
    names = [str(path) for path in files if path.stat().st_size]
    if kind == "arrow":
        return load_dataset("arrow", data_files=names, split="train", streaming=True)
    if kind == "csv":  # every value as it is written: nan and NA are words, 007 is no number
        columns = Features({str(name): Value("string") for name in pandas.read_csv(names[0], nrows=0).columns})
        return IterableDataset.from_csv(names, features=columns, na_filter=False).reshard()
    return IterableDataset.from_parquet(names, columns=_chosen(names, columns)).reshard()


def _chosen(names: Sequence[str], columns: Sequence[str]) -> list[str] | None:
    """Return the columns to read of parquet files; None: all, as the first file lacks one of them."""
    lacking = {name: [column for column in columns if column not in parquet.read_schema(name).names] for name in names}
    if not columns or lacking[names[0]]:
        return None
    for name, missing in lacking.items():
        if missing:
            raise ValueError(f"{name} has no column {missing[0]!r}, which {names[0]} has")
    return [*columns]


def _texts(files: list[str]) -> Iterator[dict[str, str | None]]:
    for file in files:
        yield {"text": read_text(Path(file))}


def _starts(path: Path) -> Iterable[int]:
    """Return where the shards of a json file begin: every so many bytes of plain lines, others are read whole."""
    size = path.stat().st_size
    is_plain = path.suffix.lower() not in COMPRESSED and _holds_lines(path)
    return range(0, size, JSON_LINES_SHARD if is_plain else max(size, 1))


def _holds_lines(path: Path) -> bool:
    """Whether each line of a json file is an object, as far as the first one tells; else values may span lines."""
    if path.suffix.lower() == ".jsonl":
        return True
    with _opened(path) as file:
        first = next((line for line in file if line.strip()), b"").removeprefix(codecs.BOM_UTF8).lstrip()
    try:
        return first[:1] == b"{" and isinstance(json.loads(first), dict)
    except ValueError:
        return False


def _opened(path: Path) -> Any:
    compression = COMPRESSED.get(path.suffix.lower())
    if compression is not None and compression not in available_compressions():
        raise ValueError(f"{path} is compressed by {compression}, which this Python lacks: pip install zstandard")
    return fsspec.open(str(path), "rb", compression=compression).open()


def _json_rows(spans: list[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    """Yield the rows of each shard; none has to agree with another on its columns or their types."""
    for path, start in spans:
        if not _holds_lines(Path(path)):
            yield from _json_values(path)
        elif Path(path).suffix.lower() not in COMPRESSED:
            yield from _json_lines(path, start)
        else:
            with _opened(Path(path)) as file:
                yield from (_json_row(line, path, number) for number, line in enumerate(file, 1) if line.strip())


def _json_values(path: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of arrays, or of objects over several lines."""
    with _opened(Path(path)) as file:
        text = file.read().decode("utf-8-sig")
    decode, place = json.JSONDecoder().raw_decode, _behind_space(text, 0)
    while place < len(text):
        value, end = decode(text, place)
        place = _behind_space(text, end)
        yield from map(_checked_row, value if isinstance(value, list) else [value])


def _behind_space(text: str, place: int) -> int:
    found = re.compile(r"\s*").match(text, place)
    return place if found is None else found.end()


def _json_lines(path: str, start: int) -> Iterator[dict[str, Any]]:
    """Yield the lines that begin in a range of a file."""
    with open(path, "rb") as file:
        if start:
            file.seek(start - 1)
            file.readline()  # it began before `start`
        while file.tell() < start + JSON_LINES_SHARD and (line := file.readline()):
            if line.strip():
                yield _json_row(line, path, place=file.tell() - len(line))


def _json_row(line: bytes, path: str, number: int = 0, place: int = 0) -> dict[str, Any]:
    """Parse a line of a file: its number, or the place where it begins.

    Raises:
        ValueError: it holds no JSON object; the message names file and line.
    """
    try:
        return _checked_row(json.loads(line))
    except ValueError as error:
        reason = str(error)
    if not number:
        with open(path, "rb") as file:
            number = 1 + sum(file.read(min(2**20, place - at)).count(b"\n") for at in range(0, place, 2**20))
    raise ValueError(f"line {number} of {path}: {reason}")


def _checked_row(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"it holds a {type(row).__name__}, expected an object")
    return row


def damage_of(files: Sequence[Path], error: Exception, columns: Sequence[str] = ()) -> str:
    """Say which of some files of rows cannot be read, and why; their readers name none.

    Args:
        files: json, parquet, csv or arrow files that were read together.
        error: how that ended.
        columns: those that were read, see `stream_rows`.
    """
    for path in files:
        try:
            for _ in stream_rows([path], columns):
                pass
        except DAMAGE as found:
            return str(found) if str(path) in str(found) else f"{path}: {found or type(found).__name__}"
    return str(error) or type(error).__name__
