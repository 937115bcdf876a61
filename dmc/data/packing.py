"""Token ids of many documents as one array on disk, read through memory maps in sequences of equal length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch.utils.data import Dataset


@dataclass(frozen=True)
class TokenArrays:
    """Documents, one after the other, in memory maps."""

    token_ids: pa.ChunkedArray
    """Token ids, an integer type."""
    ends: np.ndarray
    """End of each document in `token_ids`, int64; a document without tokens has the previous one's."""
    scored: pa.ChunkedArray | None = None
    """Whether each token is trained on, uint8; None: all are."""


@dataclass(frozen=True)
class Window:
    """Consecutive tokens."""

    token_ids: np.ndarray
    scored: np.ndarray
    """Whether each token is trained on."""
    starts: np.ndarray
    """Whether each token is the first of the window or of a document."""

    def filled_up(self, length: int) -> Window:
        """Repeat the last token up to a length, as a document that is not trained on."""
        num_added = length - len(self.token_ids)
        if not num_added:
            return self
        return Window(
            np.pad(self.token_ids, (0, num_added), mode="edge"),
            np.pad(self.scored, (0, num_added)),
            np.concatenate((self.starts, np.arange(num_added) == 0)),
        )


class TokenTable:
    """Reads documents as one flat array; pickling copies the function that opens them, not their content.

    Args:
        open_arrays: opens them, at the first use in every process.
    """

    def __init__(self, open_arrays: Callable[[], TokenArrays]) -> None:
        self._open_arrays = open_arrays

    def __getstate__(self) -> dict[str, Any]:
        return {"_open_arrays": self._open_arrays}

    @cached_property
    def _arrays(self) -> TokenArrays:
        return self._open_arrays()

    def __len__(self) -> int:
        return len(self._arrays.token_ids)

    @property
    def num_bytes(self) -> int:
        """Size of the token ids on disk."""
        return self._arrays.token_ids.nbytes

    @property
    def num_documents(self) -> int:
        """Number of documents with tokens."""
        return int(np.count_nonzero(np.diff(self._arrays.ends, prepend=0)))

    @property
    def num_skipped(self) -> int:
        """Number of documents without tokens."""
        return len(self._arrays.ends) - self.num_documents

    def document_at(self, position: int) -> int:
        """Return the index of a token's document, counting those without tokens too."""
        return int(np.searchsorted(self._arrays.ends, position, side="right"))

    def spans_of_documents(self, length: int) -> np.ndarray:
        """Divide the documents, in their order, into spans of at most `length` tokens.

        Returns:
            Begin and end of each span, int64 [n, 2]; a document that is longer has a span of its first tokens.
        """
        ends, spans, begin = np.unique(self._arrays.ends), [], 0
        ends = ends[ends > 0]
        while begin < len(self):
            first = int(np.searchsorted(ends, begin, side="right"))
            fitting = int(np.searchsorted(ends, begin + length, side="right"))
            end = int(ends[max(first, fitting - 1)])
            spans.append((begin, min(end, begin + length)))
            begin = end
        return np.array(spans, dtype=np.int64).reshape(-1, 2)

    def num_scored(self, start: int, stop: int) -> int:
        """Return how many tokens from `start` up to `stop` are trained on."""
        scored = self._arrays.scored
        return stop - start if scored is None else pc.sum(scored.slice(start, stop - start)).as_py() or 0

    def window(self, start: int, stop: int) -> Window:
        """Return the tokens from `start` up to `stop`."""
        arrays, length = self._arrays, stop - start
        token_ids = arrays.token_ids.slice(start, length).to_numpy().astype(np.int64)
        scored, starts = np.ones(length, dtype=bool), np.zeros(length, dtype=bool)
        if arrays.scored is not None:
            scored = arrays.scored.slice(start, length).to_numpy().astype(bool)
        starts[:1] = True
        starts[arrays.ends[slice(*np.searchsorted(arrays.ends, [start, stop]))] - start] = True
        return Window(token_ids, scored, starts)


class PackedTokens(Dataset[dict[str, Any]]):
    """Reads tokens as non-overlapping sequences of equal length.

    Documents are cut where a sequence ends, and the tail shorter than a sequence is left out. With `whole_documents` a
    sequence holds as many documents as fit, in their order, and is filled up with its last token, which is not trained
    on; of a document that is longer than a sequence the beginning alone is read.

    An item is `{"input_ids": int64 [sequence_length], "index": int}`; on request with "loss_mask", whether each token
    is trained on, and "document_starts", whether each is the first of a document or of the sequence, bool
    [sequence_length]; what a sequence is filled up with is a document too. With `whole_documents` its "token_mask" is
    False there: no cache will hold these tokens, and no ratio counts them.

    Raises:
        ValueError: `tokens` is shorter than one sequence, or `sequence_length` is below 1.
    """

    def __init__(
        self,
        tokens: TokenTable,
        sequence_length: int,
        *,
        loss_mask: bool = False,
        document_starts: bool = False,
        whole_documents: bool = False,
    ) -> None:
        if sequence_length < 1:
            raise ValueError(f"sequence_length={sequence_length}: expected a whole number >= 1")
        if len(tokens) < (1 if whole_documents else sequence_length):
            raise ValueError(
                f"The corpus has {len(tokens)} tokens, fewer than one sequence (sequence_length={sequence_length}); "
                "add text or lower sequence_length."
            )
        self.tokens, self.sequence_length = tokens, sequence_length
        self.loss_mask, self.document_starts = loss_mask or whole_documents, document_starts
        self._spans = tokens.spans_of_documents(sequence_length) if whole_documents else None

    def __len__(self) -> int:
        return len(self.tokens) // self.sequence_length if self._spans is None else len(self._spans)

    def num_scored(self) -> int:
        """Return how many tokens of all sequences are trained on."""
        spans = [(0, len(self) * self.sequence_length)] if self._spans is None else self._spans.tolist()
        return sum(self.tokens.num_scored(begin, end) for begin, end in spans)

    @property
    def num_cut(self) -> int:
        """Number of tokens that are not read, as they lie behind the beginning of a document longer than a sequence."""
        return 0 if self._spans is None else len(self.tokens) - int(np.diff(self._spans).sum())

    def document_of(self, index: int, place: int) -> int:
        """Return the index of the document of a sequence's token."""
        return self.tokens.document_at(self._span(index)[0] + place)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"index={index} is outside the {len(self)} sequences.")
        begin, end = self._span(index)
        window = self.tokens.window(begin, end).filled_up(self.sequence_length)
        item = {"input_ids": torch.from_numpy(window.token_ids), "index": int(index)}
        if self._spans is not None:
            item["token_mask"] = torch.arange(self.sequence_length) < end - begin
        if self.loss_mask:
            item["loss_mask"] = torch.from_numpy(window.scored)
        if self.document_starts:
            item["document_starts"] = torch.from_numpy(window.starts)
        return item

    def _span(self, index: int) -> tuple[int, int]:
        if self._spans is None:
            return index * self.sequence_length, (index + 1) * self.sequence_length
        begin, end = self._spans[index].tolist()
        return begin, end
