"""Sources tokenized once into a folder of Arrow files, by `datasets`, and opened as packed sequences.

A folder holds the parts of a corpus, each in a cache of `datasets`, and at last `index.json`: the files with their
checksums, which `datasets` lacks. A kill loses the unfinished part; damaged parts are rebuilt. One process builds a
folder at a time, others wait for it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import datasets
import multiprocess
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from dmc.checksums import available_cores, file_damage, read_list, write_list
from dmc.data.encoding import EMPTY, DocumentEncoder, Refusals
from dmc.data.order import Blend
from dmc.data.packing import PackedTokens, TokenArrays, TokenTable
from dmc.data.sources import Document, DocumentSource
from dmc.data.tokenizer import Framing, framing_of, tokenizer_digest

logger = logging.getLogger(__name__)

INDEX_NAME = "index.json"
PART_BYTES = 2**30
"""Bytes of text in a part, the most that a kill can lose."""
_FORMAT = 3  # raise it when the stored layout changes: what was cached before is tokenized anew, the old files stay
_JOB_BYTES = 2**26  # text worth a process
_BATCH_CHARACTERS = 2**22  # text encoded at once
_CHECKED_BYTES = 2**28  # read at most to verify a folder at every opening; beyond it, of evenly spread files


class _TextError(ValueError):
    """Unreadable text; found again inside the error that `datasets` raises for all errors."""


def build_packed(
    sources: DocumentSource | Sequence[DocumentSource],
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    cache_folder: str | Path,
    *,
    seed: int = 0,
    tokenize_num_proc: int | None = None,
    framing: Framing | None = None,
    document_starts: bool = False,
) -> PackedTokens | Blend:
    """Tokenize sources into the cache, where that is not done yet, and open them as one dataset.

    The cache holds one folder per (documents, tokenizer, framing), whatever the sequence length or weight. Every
    opening checks the sizes of its files and the bytes of up to 256 MiB; remove `index.json` to rebuild it.

    Args:
        sources: sources of the documents.
        tokenizer: any tokenizer with an eos token, which separates the documents.
        sequence_length: tokens per item.
        cache_folder: folder of the token arrays, created when the first is written.
        seed: order of a blend.
        tokenize_num_proc: processes that tokenize; None: the cores that this process may use.
        framing: special tokens around each document; None: as in the pretraining of the tokenizer's model.
        document_starts: whether items have the starts of documents.
    Returns:
        The sequences of one source, in the documents' order; for several sources, an endless blend by their weights.
    Raises:
        FileNotFoundError: a file, folder or hub name does not exist.
        ValueError: a corpus without documents or shorter than one sequence, a missing column, no eos token.
        TypeError: a column does not hold text.
        ChildProcessError: a process that tokenized was killed.
    """
    sources = list(sources) if isinstance(sources, Iterable) else [sources]
    encoder = DocumentEncoder(tokenizer, framing or framing_of(tokenizer))
    cached = [_Cache(source, encoder, Path(cache_folder)) for source in sources]
    for each in cached:
        each.open()
    options = {"loss_mask": any(source.has_loss_mask for source in sources), "document_starts": document_starts}
    packed = [
        PackedTokens(each.built(tokenize_num_proc or available_cores()), sequence_length, **options) for each in cached
    ]
    return packed[0] if len(packed) == 1 else Blend(packed, [source.weight for source in sources], seed)


def check_text(
    sources: Sequence[DocumentSource],
    tokenizer: PreTrainedTokenizerBase,
    cache_folder: str | Path,
    framing: Framing | None = None,
) -> None:
    """Raise a clear error if a source is neither in the cache nor readable, see `build_packed`; write nothing."""
    encoder = DocumentEncoder(tokenizer, framing or framing_of(tokenizer))
    for source in sources:
        _Cache(source, encoder, Path(cache_folder)).open()


class _Cache:
    """The tokens of a source, and the folder that they are kept in."""

    def __init__(self, source: DocumentSource, encoder: DocumentEncoder, cache_folder: Path) -> None:
        self.source, self.encoder, self.cache_folder = source, encoder, cache_folder
        self.table: TokenTable | None = None
        """The tokens, where they are built and whole."""

    @cached_property
    def folder(self) -> Path:
        """Where the tokens of these documents, by this tokenizer, lie."""
        tokenizer = tokenizer_digest(self.encoder.tokenizer, self.encoder.framing)
        template = str(self.encoder.tokenizer.chat_template) if self.source.has_loss_mask else None
        key = Hasher.hash(json.dumps([_FORMAT, self.source.description(), tokenizer, template], sort_keys=True))
        name = re.sub(r"[^A-Za-z0-9_.]+", "-", self.source.label).strip("-.")[-64:]
        return self.cache_folder.absolute() / f"{name}-{key}"  # as `datasets` names the files in it

    def open(self) -> None:
        """Open the tokens where they are there; else see to it that the source can be read."""
        self.table = self.source.open_tokens(len(self.encoder.tokenizer))
        if self.table is None:
            self.table = self._open_whole()
        if self.table is None:
            self.source.check()

    def built(self, tokenize_num_proc: int) -> TokenTable:
        """Tokenize what is not there yet; one process at a time, those that come later find it done."""
        if self.table is not None:
            return self.table
        self._require_text()
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder.with_name(f".{self.folder.name}.lock")):
            table = self._open_whole()
            if table is None:
                self._remove_damaged()
                files = [path for part in self._parts(tokenize_num_proc) for path in part]
                self._check_refused(files)
                write_list(self.folder / INDEX_NAME, files)
                table = TokenTable(partial(_open_files, list(self._records())))
                if table.num_skipped:
                    lacks = "an answer, or refused" if self.source.has_loss_mask else "text or not in utf-8"
                    told = self.source.label, table.num_skipped, lacks, table.num_documents
                    logger.warning("%s: skipped %d documents without %s, kept %d.", *told)
        return table

    def _parts(self, tokenize_num_proc: int) -> Iterator[list[Path]]:
        """Yield the files of each part as it is finished."""
        num_bytes, num_shards = self.source.num_bytes(), self.source.stream().num_shards
        num_parts = max(1, min(-(-num_bytes // PART_BYTES), num_shards))
        num_jobs = max(1, min(tokenize_num_proc, num_shards // num_parts, num_bytes // num_parts // _JOB_BYTES))
        ids = datasets.List(datasets.Value("uint16" if self._vocab_size <= 2**16 else "int32"))
        features = {"input_ids": ids}
        if self.source.has_loss_mask:
            features["scored"] = datasets.List(datasets.Value("uint8"))
            features["refusal"] = datasets.Value("string")
        for number in range(num_parts):
            with _quiet(), self._naming_failures(tokenize_num_proc):
                part = datasets.Dataset.from_generator(
                    partial(_rows, self.source, self.encoder, (num_parts, number), num_jobs),
                    features=datasets.Features(features),
                    cache_dir=str(self.folder / f"{number:05d}-of-{num_parts:05d}"),
                    gen_kwargs={"jobs": list(range(num_jobs))},
                    num_proc=num_jobs if num_jobs > 1 else None,
                    fingerprint=f"{number}",
                )
            yield [Path(file["filename"]) for file in part.cache_files]

    def _check_refused(self, files: Sequence[Path]) -> None:
        """Refuse a source of whose chats the template refuses more than a tenth."""
        if self.source.has_loss_mask:
            refusals = Refusals(self.source.label)
            for path in files:
                for reason in datasets.Dataset.from_file(str(path)).data.table["refusal"].to_pylist():
                    refusals.add(dataclasses.replace(EMPTY, refusal=reason))
            refusals.check()

    @property
    def _vocab_size(self) -> int:
        framing = self.encoder.framing
        return max(len(self.encoder.tokenizer), *(each + 1 for each in (*framing.begin, framing.end)))

    @contextmanager
    def _naming_failures(self, tokenize_num_proc: int) -> Iterator[None]:
        try:
            yield
        except DatasetGenerationError as error:
            told = re.findall(rf"{_TextError.__name__}: (.*)", "".join(traceback.format_exception(error)))
            raise (ValueError(told[0]) if told else error) from error  # of other processes the traceback alone arrives
        except RuntimeError as error:
            if "abruptly died" not in str(error):
                raise
            raise ChildProcessError(
                f"A process that tokenized {self.source.label!r} was killed, maybe for want of memory: lower "
                f"data.tokenize_num_proc={tokenize_num_proc}. Finished parts are kept in {self.folder}."
            ) from error

    def _require_text(self) -> None:
        refusals = Refusals(self.source.label)
        for document in self.source.read(self.source.stream()):
            encoded = self.encoder([document])[0]
            if len(encoded.token_ids):
                return
            refusals.add(encoded)
        refusals.check()
        raise ValueError(
            f"The corpus {self.source.label!r} is empty: no document holds text (in utf-8). Check its path and column."
        )

    def _open_whole(self) -> TokenTable | None:
        """Open the folder if it is built and passes the quick check."""
        if not (self.folder / INDEX_NAME).exists():
            return None
        try:
            for path, problem in self._damaged(_CHECKED_BYTES):
                logger.warning("Cached tokens %s: the file %s; it is rebuilt.", path, problem)
                return None
            return TokenTable(partial(_open_files, list(self._records())))
        except ValueError as error:
            logger.warning("Cached tokens %s: the index cannot be read (%s); it is rebuilt.", self.folder, error)
            return None

    def _remove_damaged(self) -> None:
        """Remove files that differ from the index; all of them, if the index itself cannot be read."""
        if not (self.folder / INDEX_NAME).exists():
            return  # a build that was killed, or none
        try:
            parts = {path.relative_to(self.folder).parts[0] for path, _ in self._damaged()}
        except ValueError:
            parts = {part.name for part in self.folder.iterdir() if part.is_dir()}
        for part in parts:
            if (self.folder / part).exists():  # it may be what somebody deleted
                shutil.rmtree(self.folder / part)

    def _damaged(self, most_bytes: int | None = None) -> Iterator[tuple[Path, str]]:
        """Compare the files with the index: the sizes of all, and of evenly spread ones so many bytes; None: all."""
        records = self._records()
        total = sum(size for size, _ in records.values())
        share = len(records) if most_bytes is None else most_bytes * len(records) // max(1, total)
        num_checked = min(len(records), max(1, share))
        checked = {len(records) * place // num_checked for place in range(num_checked)}
        for number, (path, (size, checksum)) in enumerate(records.items()):
            if problem := file_damage(path, size, checksum if number in checked else None):
                yield path, problem

    def _records(self) -> dict[Path, tuple[int, int]]:
        records = read_list(self.folder / INDEX_NAME)
        if flat := [name for name in records if len(Path(name).parts) < 2]:
            raise ValueError(f"it names {flat[0]}, which is in no part")
        return {self.folder / name: record for name, record in records.items()}


def _rows(
    source: DocumentSource, encoder: DocumentEncoder, part: tuple[int, int], num_jobs: int, jobs: list[int]
) -> Iterator[dict[str, Any]]:
    """Yield one row for each document of some jobs of a part of a source, empty where it holds no text."""
    _obey_parent()
    try:
        for job in jobs:
            for batch in _batches(source.read(source.stream().shard(*part).shard(num_jobs, job))):
                for encoded in encoder(batch):
                    row: dict[str, Any] = {"input_ids": encoded.token_ids}
                    if encoded.scored is not None:
                        row |= {"scored": encoded.scored, "refusal": encoded.refusal}
                    yield row
    except (ValueError, TypeError, OSError) as error:
        raise _TextError(str(error)) from error


def _obey_parent() -> None:
    """Make a child process end with its parent, leave signals to it, and use one thread."""
    parent = multiprocess.parent_process()
    if parent is None:
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # Slurm warns every process; the parent deals with it

    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    num_characters = 0
    for document in documents:
        batch.append(document)
        num_characters += len(document) if isinstance(document, str) else 2**12
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _open_files(paths: Sequence[Path]) -> TokenArrays:
    """Map the Arrow files: the values of a column of lists are the token ids, one document after the other."""
    table = pa.concat_tables([datasets.Dataset.from_file(str(path)).data.table for path in paths])
    flat = {name: pc.list_flatten(table[name]) for name in table.column_names if name != "refusal"}
    ends = np.cumsum(pc.list_value_length(table["input_ids"]).to_numpy(), dtype=np.int64)
    return TokenArrays(flat["input_ids"], ends, flat.get("scored"))


@contextmanager
def _quiet() -> Iterator[None]:
    """Show the progress of `datasets` only on a terminal."""
    if sys.stderr.isatty() or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
