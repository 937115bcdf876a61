"""Sources of documents opened as packed sequences, out of the token cache."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dmc.data.blend import Blend
from dmc.data.packing import PackedTokens
from dmc.data.token_cache import DocumentSource, build_shards, open_shards
from dmc.data.token_shards import ShardIndex, TokenShards
from dmc.data.tokenizer import Framing, framing_of, tokenizer_digest

logger = logging.getLogger(__name__)

_FORMAT = 2  # raise it when the stored layout changes: what was cached before is tokenised anew, the old files stay


def build_packed(
    sources: DocumentSource | Sequence[DocumentSource],
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    cache_folder: str | Path,
    *,
    seed: int = 0,
    num_processes: int | None = None,
    framing: Framing | None = None,
) -> PackedTokens | Blend:
    """Tokenise sources into cached shards, where that is not done yet, and open them as one dataset.

    The cache holds one folder per (documents, tokenizer, framing), whatever the sequence length or weight. Every
    opening checks the sizes of the shards and the bytes of up to 256 MiB; remove a folder's `index.json` for all.
    A damaged shard is rebuilt with a warning. Any number of processes and machines may build the same folder at once.

    Args:
        sources: where the documents come from.
        tokenizer: any tokenizer with an eos token, which separates the documents.
        sequence_length: tokens per item.
        cache_folder: folder of the token arrays, created when the first is written.
        seed: order of a blend.
        num_processes: processes that tokenise; None: the cores that this process may use. Other than one, the calling
            script needs `if __name__ == "__main__":`.
        framing: what stands around each document; None: as in the pretraining of the tokenizer's model.
    Returns:
        The sequences of the one source, in the documents' order; of several sources, an endless blend in their weights.
    Raises:
        FileNotFoundError: a file, folder or hub name does not exist.
        ValueError: no source, a corpus without documents or shorter than one sequence, a missing column, no eos token.
        TypeError: a column does not hold text.
        ChildProcessError: a process that tokenised was killed.
    """
    sources = list(sources) if isinstance(sources, Iterable) else [sources]
    if not sources:
        raise ValueError("No source of documents; pass at least one, for instance TextSource('corpus/*.txt').")
    if sequence_length < 1:
        raise ValueError(f"sequence_length={sequence_length} must be at least 1.")
    framing = framing or framing_of(tokenizer)
    cached = [_Cached(source, tokenizer, framing, Path(cache_folder)) for source in sources]
    for each in cached:
        if each.index is None:
            each.source.check()
    packed = [each.open(sequence_length, num_processes or available_cores()) for each in cached]
    if len(packed) == 1:
        return packed[0]
    return Blend(packed, [source.weight for source in sources], seed)


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Cached:
    """A source's place in the cache, and its index where it is built and whole."""

    def __init__(
        self, source: DocumentSource, tokenizer: PreTrainedTokenizerBase, framing: Framing, cache_folder: Path
    ) -> None:
        digest = tokenizer_digest(tokenizer, framing)
        content = {"format": _FORMAT, "source": source.description(), "tokenizer": digest}
        self.source, self.tokenizer, self.framing = source, tokenizer, framing
        self.key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        name = re.sub(r"[^A-Za-z0-9_.]+", "-", source.label).strip("-.")[-64:]
        self.folder = cache_folder / f"{name}-{self.key[:16]}"
        self.index = open_shards(self.folder, self.key)

    def open(self, sequence_length: int, num_processes: int) -> PackedTokens:
        index = self.index
        if index is None:
            index = build_shards(self.source, self.tokenizer, self.folder, self.key, num_processes, self.framing)
            self._report_skipped(index)
        return PackedTokens(
            TokenShards(self.folder, [shard.num_tokens for shard in index.shards], index.dtype),
            sequence_length,
            num_documents=index.total("num_documents"),
            num_skipped=index.total("num_empty") + index.total("num_undecodable"),
        )

    def _report_skipped(self, index: ShardIndex) -> None:
        num_empty, num_undecodable = index.total("num_empty"), index.total("num_undecodable")
        if num_empty or num_undecodable:
            logger.warning(
                "%s: skipped %d empty and %d undecodable documents, kept %d.",
                self.source.label,
                num_empty,
                num_undecodable,
                index.total("num_documents"),
            )
