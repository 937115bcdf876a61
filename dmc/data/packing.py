"""Tokens of documents, one behind the other, cut in sequences of equal length."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from dmc.data.tokens import TokenChunk, TokenTable


class PackedTokens(Dataset[dict[str, Any]]):
    """Reads tokens as non-overlapping sequences; the tail shorter than a sequence is left out.

    An item is `{"input_ids": int64 [sequence_length], "index": int}`; where asked for, with "loss_mask", whether each
    token is learned, and "document_starts", whether each is the first of a document or of the sequence, bool
    [sequence_length].
    """

    def __init__(
        self,
        tokens: np.ndarray | TokenTable,
        sequence_length: int,
        *,
        loss_mask: bool = False,
        document_starts: bool = False,
    ) -> None:
        """Check the array and count its sequences.

        Args:
            tokens: token ids, integer, in memory [num_tokens] or on disk.
            sequence_length: tokens per sequence, >= 1.
            loss_mask: whether items have one.
            document_starts: whether items have them.
        Raises:
            TypeError: `tokens` is not a one-dimensional integer array.
            ValueError: `sequence_length` < 1, or `tokens` is shorter than one sequence.
        """
        if isinstance(tokens, np.ndarray):
            if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
                raise TypeError(
                    f"tokens has shape {list(tokens.shape)} and dtype {tokens.dtype}; expected one flat array of "
                    "integers."
                )
            chunk = TokenChunk(tokens, np.array([len(tokens)]))
            tokens = TokenTable(lambda: [chunk])
        if sequence_length < 1:
            raise ValueError(f"sequence_length={sequence_length} must be at least 1.")
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
        """Number the document that a sequence's token is of."""
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
