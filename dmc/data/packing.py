"""Token ids of many documents as one array on disk, read through memory maps in sequences of equal length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


@dataclass(frozen=True)
class TokenChunk:
    """An array of whole documents, one after the other."""

    token_ids: np.ndarray
    """Token ids, [num_tokens], an integer type."""
    ends: np.ndarray
    """End of each document in `token_ids`; a document without tokens has the previous one's."""
    scored: np.ndarray | None = None
    """Whether each token is trained on; None: all are."""


@dataclass(frozen=True)
class Window:
    """Consecutive tokens."""

    token_ids: np.ndarray
    scored: np.ndarray
    """Whether each token is trained on."""
    starts: np.ndarray
    """Whether each token is the first of the window or of a document."""


class TokenTable:
    """Reads chunks as one flat array; pickling copies the function that opens them, not their content.

    Args:
        open_chunks: opens the chunks, at the first use in every process.
    """

    def __init__(self, open_chunks: Callable[[], Sequence[TokenChunk]]) -> None:
        self._open_chunks = open_chunks

    def __getstate__(self) -> dict[str, Any]:
        return {"_open_chunks": self._open_chunks}

    @cached_property
    def _chunks(self) -> list[TokenChunk]:
        return [chunk for chunk in self._open_chunks() if len(chunk.ends)]

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.cumsum([0, *(len(chunk.token_ids) for chunk in self._chunks)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def num_bytes(self) -> int:
        """Size of the token ids on disk."""
        return sum(chunk.token_ids.nbytes for chunk in self._chunks)

    @property
    def num_documents(self) -> int:
        """Number of documents with tokens."""
        return sum(int(np.count_nonzero(np.diff(chunk.ends, prepend=0))) for chunk in self._chunks)

    @property
    def num_skipped(self) -> int:
        """Number of documents without tokens."""
        return sum(len(chunk.ends) for chunk in self._chunks) - self.num_documents

    def document_at(self, position: int) -> int:
        """Return the index of a token's document, counting those without tokens too."""
        number = int(np.searchsorted(self._starts, position, side="right")) - 1
        before = sum(len(chunk.ends) for chunk in self._chunks[:number])
        ends, place = self._chunks[number].ends, position - self._starts[number]
        return before + int(np.searchsorted(ends, place, side="right"))

    def window(self, start: int, stop: int) -> Window:
        """Return the tokens from `start` up to `stop`, which may span several chunks."""
        token_ids = np.empty(stop - start, dtype=np.int64)
        scored, starts = np.ones(stop - start, dtype=bool), np.zeros(stop - start, dtype=bool)
        starts[:1] = True
        number = max(0, int(np.searchsorted(self._starts, start, side="right")) - 1)
        for chunk, begin in zip(self._chunks[number:], self._starts[number:-1].tolist(), strict=True):
            if begin >= stop:
                break
            first, last = max(start - begin, 0), min(stop - begin, len(chunk.token_ids))
            place = slice(first + begin - start, last + begin - start)
            token_ids[place] = chunk.token_ids[first:last]
            if chunk.scored is not None:
                scored[place] = chunk.scored[first:last]
            low, high = np.searchsorted(chunk.ends, [first, last])
            ends = chunk.ends[low:high].astype(np.int64) + begin - start
            starts[ends[ends > 0]] = True
            starts[place.start : place.start + 1] |= first == 0
        return Window(token_ids, scored, starts)


class PackedTokens(Dataset[dict[str, Any]]):
    """Reads tokens as non-overlapping sequences; the tail shorter than a sequence is left out.

    An item is `{"input_ids": int64 [sequence_length], "index": int}`; on request with "loss_mask", whether each token
    is trained on, and "document_starts", whether each is the first of a document or of the sequence, bool
    [sequence_length].
    """

    def __init__(
        self,
        tokens: TokenTable,
        sequence_length: int,
        *,
        loss_mask: bool = False,
        document_starts: bool = False,
    ) -> None:
        """Count the sequences.

        Args:
            tokens: tokens of all documents.
            sequence_length: tokens per sequence, >= 1.
            loss_mask: whether items have "loss_mask".
            document_starts: whether items have "document_starts".
        Raises:
            ValueError: `tokens` is shorter than one sequence, or `sequence_length` is below 1.
        """
        if sequence_length < 1:
            raise ValueError(f"sequence_length={sequence_length}: expected a whole number >= 1")
        if len(tokens) < sequence_length:
            raise ValueError(
                f"The corpus has {len(tokens)} tokens, fewer than one sequence (sequence_length={sequence_length}); "
                "add text or lower sequence_length."
            )
        self.tokens, self.sequence_length = tokens, sequence_length
        self.loss_mask, self.document_starts = loss_mask, document_starts

    def __len__(self) -> int:
        return len(self.tokens) // self.sequence_length

    def document_of(self, index: int, place: int) -> int:
        """Return the index of the document of a sequence's token."""
        return self.tokens.document_at(index * self.sequence_length + place)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"index={index} is outside the {len(self)} sequences.")
        window = self.tokens.window(index * self.sequence_length, (index + 1) * self.sequence_length)
        item = {"input_ids": torch.from_numpy(window.token_ids), "index": int(index)}
        if self.loss_mask:
            item["loss_mask"] = torch.from_numpy(window.scored)
        if self.document_starts:
            item["document_starts"] = torch.from_numpy(window.starts)
        return item
