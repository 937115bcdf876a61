"""Sources of documents, tokenised once into packed arrays that are cached on disk."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from dmc.data.blend import Blend
from dmc.data.packing import PackedTokens, pack_documents, token_dtype
from dmc.data.tokenizer import encode_documents, separator_id_of, tokenizer_digest

logger = logging.getLogger(__name__)

_FORMAT = 1  # raise it when the stored layout changes: older files are then rebuilt
_BATCH_CHARACTERS = 2**22  # text encoded at once
_CHECKED_BLOCKS, _CHECKED_BYTES = 256, 2**20  # a checksum of all of a file up to 256 MiB, of spread blocks beyond


class DocumentSource(Protocol):
    """Where documents come from; `TextSource` and `StandardLibrarySource` are two."""

    label: str
    """A few letters for messages and file names."""
    weight: float
    """Share in a blend, relative to the other sources, > 0."""

    def check(self) -> None:
        """Raise a clear error if the documents cannot be read; write nothing."""

    def description(self) -> dict[str, Any]:
        """Return what identifies the documents (specification, file sizes and times), for the cache key."""

    def documents(self) -> Iterator[str | None]:
        """Yield each document's text, None for one that cannot be decoded; always in the same order."""


@dataclass(frozen=True)
class CacheRecord:
    """The sidecar of a cached token array: what it holds and how to tell that it is whole."""

    key: str
    """Hash of the source's description and of the tokenizer."""
    dtype: str
    """Stored type of a token id: uint16 or int32."""
    num_tokens: int
    num_documents: int
    num_empty: int
    num_undecodable: int
    num_bytes: int
    checksum: int
    """CRC-32 of the file up to 256 MiB; of 256 evenly spread blocks of 1 MiB for a larger file."""


def file_stamps(paths: Iterable[Path], relative_to: Path | None = None) -> list[list[Any]]:
    """Return [path, size in bytes, modification time in ns] of each file."""
    stamps: list[list[Any]] = []
    for path in paths:
        status = path.stat()
        name = path.relative_to(relative_to) if relative_to else path.resolve()
        stamps.append([name.as_posix(), status.st_size, status.st_mtime_ns])
    return stamps


def _checksum(path: Path) -> int:
    size = path.stat().st_size
    last_start = max(0, size - _CHECKED_BYTES)
    num_blocks = min(_CHECKED_BLOCKS, -(-size // _CHECKED_BYTES))
    value = 0
    with path.open("rb") as file:
        for block in range(num_blocks):
            file.seek(last_start * block // max(1, num_blocks - 1))
            value = zlib.crc32(file.read(_CHECKED_BYTES), value)
    return value


def _cache_key(source: DocumentSource, tokenizer: PreTrainedTokenizerBase) -> str:
    content = {"format": _FORMAT, "source": source.description(), "tokenizer": tokenizer_digest(tokenizer)}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_record(path: Path, key: str) -> CacheRecord | None:
    """Return the sidecar's record if the cached file is there and is what the sidecar says, else None."""
    sidecar = path.with_suffix(".json")
    if not path.exists() and not sidecar.exists():
        return None
    try:
        record = CacheRecord(**json.loads(sidecar.read_text()))
        if record.key != key:
            problem = "belongs to another corpus"
        elif path.stat().st_size != record.num_bytes:
            problem = f"has {path.stat().st_size} bytes, expected {record.num_bytes}"
        elif _checksum(path) != record.checksum:
            problem = "has a wrong checksum"
        else:
            return record
    except (OSError, ValueError, TypeError) as error:
        problem = f"cannot be read ({error})"
    logger.warning("Cached tokens %s: the file %s; it is rebuilt.", path, problem)
    return None


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    num_characters = 0
    for text in documents:
        batch.append(text)
        num_characters += len(text)
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _write_tokens(source: DocumentSource, tokenizer: PreTrainedTokenizerBase, path: Path, key: str) -> CacheRecord:
    """Tokenise a source into `path` and its sidecar; each appears under its name only when it is whole."""
    separator_id = separator_id_of(tokenizer)
    dtype = token_dtype(max(len(tokenizer), separator_id + 1))
    counts = {"num_tokens": 0, "num_documents": 0, "num_empty": 0, "num_undecodable": 0}

    def readable() -> Iterator[str]:
        for text in tqdm(source.documents(), desc=f"tokenising {source.label}", unit=" documents", disable=None):
            if text is None:
                counts["num_undecodable"] += 1
            elif not text.strip():
                counts["num_empty"] += 1
            else:
                yield text

    def packed() -> Iterator[np.ndarray]:
        for batch in _batches(readable()):
            documents = [token_ids for token_ids in encode_documents(tokenizer, batch) if token_ids]
            counts["num_empty"] += len(batch) - len(documents)
            counts["num_documents"] += len(documents)
            if documents:
                yield pack_documents(documents, separator_id, dtype)

    temporary = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
    parts = packed()
    first = next(parts, None)
    if first is None:
        raise ValueError(
            f"The corpus {source.label!r} is empty: no document holds text ({counts['num_empty']} are empty, "
            f"{counts['num_undecodable']} are not utf-8). Check its path and column."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("wb") as file:
            for part in itertools.chain([first], parts):
                part.tofile(file)
                counts["num_tokens"] += len(part)
        record = CacheRecord(
            key=key, dtype=dtype.name, num_bytes=temporary.stat().st_size, checksum=_checksum(temporary), **counts
        )
        os.replace(temporary, path)
        temporary.write_text(json.dumps(asdict(record), indent=1))
        os.replace(temporary, path.with_suffix(".json"))
    finally:
        temporary.unlink(missing_ok=True)
    return record


def _open_packed(
    source: DocumentSource, tokenizer: PreTrainedTokenizerBase, sequence_length: int, cache_folder: Path
) -> PackedTokens:
    """Open a source's cached tokens, building them first where they are missing or damaged."""
    key = _cache_key(source, tokenizer)
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", source.label).strip("-.")[-64:]
    path = cache_folder / f"{name}-{key[:16]}.bin"
    record = _read_record(path, key)
    if record is None:
        record = _write_tokens(source, tokenizer, path, key)
        if record.num_empty or record.num_undecodable:
            logger.warning(
                "%s: skipped %d empty and %d undecodable documents, kept %d.",
                source.label,
                record.num_empty,
                record.num_undecodable,
                record.num_documents,
            )
    return PackedTokens(
        np.memmap(path, dtype=record.dtype, mode="r", shape=(record.num_tokens,)),
        sequence_length,
        num_documents=record.num_documents,
        num_skipped=record.num_empty + record.num_undecodable,
    )


def build_packed(
    sources: DocumentSource | Sequence[DocumentSource],
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    cache_folder: str | Path,
    *,
    seed: int = 0,
) -> PackedTokens | Blend:
    """Tokenise sources into cached packed arrays and open them as one dataset.

    The cache holds one file per (documents, tokenizer), whatever the sequence length or weight; a damaged file is
    rebuilt with a warning. Two processes that build the same file at once both succeed, but let one build first.

    Args:
        sources: where the documents come from.
        tokenizer: any tokenizer with an eos token, which separates the documents.
        sequence_length: tokens per item.
        cache_folder: folder of the token arrays, created when the first is written.
        seed: order of a blend.
    Returns:
        The sequences of the one source, in the documents' order; of several sources, an endless blend in their weights.
    Raises:
        FileNotFoundError: a file, folder or hub name does not exist.
        ValueError: no source, a corpus without documents or shorter than one sequence, a missing column, no eos token.
        TypeError: a column does not hold text.
    """
    sources = list(sources) if isinstance(sources, Iterable) else [sources]
    if not sources:
        raise ValueError("No source of documents; pass at least one, for instance TextSource('corpus/*.txt').")
    if sequence_length < 1:
        raise ValueError(f"sequence_length={sequence_length} must be at least 1.")
    separator_id_of(tokenizer)
    for source in sources:
        source.check()
    packed = [_open_packed(source, tokenizer, sequence_length, Path(cache_folder)) for source in sources]
    if len(packed) == 1:
        return packed[0]
    return Blend(packed, [source.weight for source in sources], seed)
