"""Documents joined in one flat token array and cut in sequences of equal length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from dmc.data.token_shards import TokenShards


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest stored type that holds every token id below `vocab_size`: uint16 or int32."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.int32)


def pack_documents(
    token_ids: Iterable[Sequence[int]],
    separator_id: int,
    dtype: np.dtype | type | None = None,
    begin: Sequence[int] = (),
) -> np.ndarray:
    """Join documents in one flat array, the separator token after each of them (also after the last).

    Args:
        token_ids: one sequence of token ids per document.
        separator_id: token id appended after each document.
        dtype: type of the result; None: uint16 where every id fits, else int32.
        begin: token ids put before each document.
    Returns:
        All token ids, [sum of (len(begin) + document length + 1)].
    Raises:
        ValueError: `separator_id` is negative (the tokenizer has none).
    """
    if separator_id < 0:
        raise ValueError(f"separator_id={separator_id} is not a token id; pass the tokenizer's eos_token_id.")
    first, separator = np.array(begin, dtype=np.int32), np.array([separator_id], dtype=np.int32)
    parts: list[np.ndarray] = []
    for document in token_ids:
        parts += (first, np.asarray(document, dtype=np.int32), separator)
    if not parts:
        return np.empty(0, dtype=dtype or np.uint16)
    flat = np.concatenate(parts)
    return flat.astype(dtype or token_dtype(int(flat.max()) + 1), copy=False)


class PackedTokens(Dataset[dict[str, Any]]):
    """Reads a flat token array as non-overlapping sequences; the tail shorter than a sequence is left out.

    An item is `{"input_ids": int64 [sequence_length], "index": int}`.

    Attributes:
        num_tokens: tokens in the array, separators and tail included.
        num_documents: documents in the array, None where unknown.
        num_skipped: documents that were left out as empty or undecodable.
    """

    def __init__(
        self,
        tokens: np.ndarray | TokenShards,
        sequence_length: int,
        *,
        num_documents: int | None = None,
        num_skipped: int = 0,
    ) -> None:
        """Check the array and count its sequences.

        Args:
            tokens: token ids, integer (uint16 or int32 by habit), in memory or on disk, [num_tokens].
            sequence_length: tokens per sequence, >= 1.
            num_documents: documents joined in `tokens`, None where unknown.
            num_skipped: documents left out of `tokens`.
        Raises:
            TypeError: `tokens` is not a one-dimensional integer array.
            ValueError: `sequence_length` < 1, or `tokens` is shorter than one sequence.
        """
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise TypeError(
                f"tokens has shape {list(tokens.shape)} and dtype {tokens.dtype}; expected one flat array of integers."
            )
        if sequence_length < 1:
            raise ValueError(f"sequence_length={sequence_length} must be at least 1.")
        if len(tokens) < sequence_length:
            raise ValueError(
                f"The corpus has {len(tokens)} tokens, fewer than one sequence (sequence_length={sequence_length}); "
                "add text or lower sequence_length."
            )
        self.tokens = tokens
        self.sequence_length = sequence_length
        self.num_tokens = len(tokens)
        self.num_documents = num_documents
        self.num_skipped = num_skipped

    def __len__(self) -> int:
        return self.num_tokens // self.sequence_length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"index={index} is outside the {len(self)} sequences.")
        start = index * self.sequence_length
        sequence = self.tokens[start : start + self.sequence_length]
        return {"input_ids": torch.from_numpy(np.array(sequence, dtype=np.int64)), "index": int(index)}
