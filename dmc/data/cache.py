"""Sources tokenized once into a folder, by `datasets`, and opened as packed sequences.

A corpus is written beside its folder and renamed when it is complete. One process builds it, others wait for it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import multiprocess
import numpy as np
import pyarrow.compute as pc
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from dmc.config.processor import available_cores
from dmc.data.encoding import EMPTY, DocumentEncoder, Refusals
from dmc.data.numbering import num_ids
from dmc.data.order import Blend
from dmc.data.packing import PackedTokens, TokenArrays, TokenTable
from dmc.data.sources import Document, DocumentSource
from dmc.data.tokenizer import Framing, framing_of, tokenizer_digest
from dmc.files import locked, written_whole

logger = logging.getLogger(__name__)

_JOB_BYTES = 2**26  # text that a process tokenizes before it takes more
_BATCH_CHARACTERS = 2**22  # text encoded at once


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
    whole_documents: bool = False,
) -> PackedTokens | Blend:
    """Tokenize sources into the cache, where that is not done yet, and open them as one dataset.

    The cache holds one folder per (documents, tokenizer, framing), whatever the sequence length or weight.

    Args:
        sources: sources of the documents.
        tokenizer: any tokenizer with an eos token, which separates the documents.
        sequence_length: tokens per item.
        cache_folder: folder of the corpora, created when the first is written.
        seed: order of a blend.
        tokenize_num_proc: processes that tokenize; None: the cores that this process may use.
        framing: special tokens around each document; None: as in the pretraining of the tokenizer's model.
        document_starts: whether items have the starts of documents.
        whole_documents: whether sequences hold whole documents, see `PackedTokens`.
    Returns:
        The sequences of one source, in the documents' order; for several sources, an endless blend by their weights.
    Raises:
        FileNotFoundError: a file, folder or hub name does not exist.
        ValueError: a corpus without documents or shorter than one sequence, a missing column, no eos token, too many
            refused chats, a damaged folder.
        TypeError: a column does not hold text.
        ChildProcessError: a process that tokenized was killed.
    """
    sources = list(sources) if isinstance(sources, Iterable) else [sources]
    encoder = DocumentEncoder(tokenizer, framing or framing_of(tokenizer))
    cached = [_Cache(source, encoder, Path(cache_folder)) for source in sources]
    for cache in cached:
        cache.check()
    options = {"loss_mask": any(source.has_loss_mask for source in sources), "document_starts": document_starts}
    options |= {"whole_documents": whole_documents}
    tables = [cache.open(tokenize_num_proc or available_cores()) for cache in cached]
    packed = [PackedTokens(table, sequence_length, **options) for table in tables]
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
        _Cache(source, encoder, Path(cache_folder)).check()


class _Cache:
    """The tokens of a source, and the folder that they are kept in."""

    def __init__(self, source: DocumentSource, encoder: DocumentEncoder, cache_folder: Path) -> None:
        self.source, self.encoder = source, encoder
        self.tokens = source.open_tokens(num_ids(encoder.tokenizer))
        """The tokens of a source that is none of text."""
        digest = tokenizer_digest(encoder.tokenizer, encoder.framing)
        template = str(encoder.tokenizer.chat_template) if source.has_loss_mask else None
        key = Hasher.hash(json.dumps([source.description(), digest, template], sort_keys=True))
        name = re.sub(r"[^A-Za-z0-9_.]+", "-", source.label).strip("-.")[-64:]
        self.folder = cache_folder.absolute() / f"{name}-{key}"

    def check(self) -> None:
        """See to it that there are tokens, or documents to make them of."""
        if self.tokens is not None:
            self.source.check_ids(num_ids(self.encoder.tokenizer), self.folder.parent)
        elif not self.folder.is_dir():
            self.source.check()

    def open(self, tokenize_num_proc: int) -> TokenTable:
        """Open the tokens, which the first process to come here makes."""
        if self.tokens is not None:
            return self.tokens
        if not self.folder.is_dir():
            self._require_text()
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.folder.with_name(f".{self.folder.name}.lock"), timeout=-1):
                if not self.folder.is_dir():
                    self._build(tokenize_num_proc)
        return TokenTable(partial(_open_folder, self.folder))

    def _build(self, tokenize_num_proc: int) -> None:
        """Tokenize; what some processes of a killed build have finished is taken from beside the folder."""
        beside = self.folder.with_name(f".{self.folder.name}.partial")
        beside.mkdir(exist_ok=True)
        stream = self.source.stream()
        num_jobs = max(1, min(-(-self.source.num_bytes() // _JOB_BYTES), stream.num_shards))
        num_proc = min(tokenize_num_proc, num_jobs)
        with _quiet(), self._naming_deaths(tokenize_num_proc):
            tokens = datasets.Dataset.from_dict({"job": range(num_jobs)}).map(
                partial(_encode, self.source, stream, num_jobs, self.encoder),
                batched=True,
                batch_size=1,
                remove_columns=["job"],
                features=self._features(),
                num_proc=num_proc if num_proc > 1 else None,
                cache_file_name=str(beside / "tokens.arrow"),
                new_fingerprint=self.folder.name[-16:],
                desc=f"Tokenizing {self.source.label}",
            )
            self._check_refused(tokens)
            with written_whole(self.folder, beside / "finished") as finished:
                tokens.save_to_disk(str(finished))
        del tokens  # it maps the files that go now
        shutil.rmtree(beside, ignore_errors=True)
        table = TokenTable(partial(_open_folder, self.folder))
        if table.num_skipped:
            lacks = "an answer, or refused" if self.source.has_loss_mask else "text or not in utf-8"
            counts = table.num_skipped, lacks, table.num_documents
            logger.warning("%s: skipped %d documents without %s, kept %d.", self.source.label, *counts)

    def _features(self) -> datasets.Features:
        framing = self.encoder.framing
        largest = max(num_ids(self.encoder.tokenizer) - 1, *framing.begin, framing.end)
        features = {"input_ids": datasets.List(datasets.Value("uint16" if largest < 2**16 else "int32"))}
        if self.source.has_loss_mask:
            features |= {"scored": datasets.List(datasets.Value("uint8")), "refusal": datasets.Value("string")}
        return datasets.Features(features)

    def _check_refused(self, tokens: datasets.Dataset) -> None:
        """Refuse a source of whose chats the template refuses more than a tenth."""
        if self.source.has_loss_mask:
            refusals = Refusals(self.source.label)
            for reason in tokens.data.column("refusal"):
                refusals.add(dataclasses.replace(EMPTY, refusal=reason.as_py()))
            refusals.check()

    @contextmanager
    def _naming_deaths(self, tokenize_num_proc: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if "abruptly died" not in str(error):
                raise
            raise ChildProcessError(
                f"A process that tokenized {self.source.label!r} was killed, maybe for want of memory: lower "
                f"data.tokenize_num_proc={tokenize_num_proc}."
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


def _encode(
    source: DocumentSource,
    stream: datasets.IterableDataset,
    num_jobs: int,
    encoder: DocumentEncoder,
    jobs: dict[str, list[int]],
) -> dict[str, list[Any]]:
    """Return one row for each document of a part of a source, empty where it holds no text."""
    parent = multiprocess.parent_process()
    if parent is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
        if not parent.is_alive():
            os._exit(1)  # it was killed, and does not wait any more
    rows: dict[str, list[Any]] = {"input_ids": []}
    if source.has_loss_mask:
        rows |= {"scored": [], "refusal": []}
    for batch in _batches(source.read(stream.shard(num_jobs, jobs["job"][0]))):
        for encoded in encoder(batch):
            for name, values in zip(rows, (encoded.token_ids, encoded.scored, encoded.refusal), strict=False):
                rows[name].append(values)
    return rows


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


def _open_folder(folder: Path) -> TokenArrays:
    """Map a corpus: the values of a column of lists are the token ids, one document after the other."""
    try:
        table = datasets.load_from_disk(str(folder)).data.table
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(f"{folder} cannot be read ({error}): remove it, and its text is tokenized again") from error
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
