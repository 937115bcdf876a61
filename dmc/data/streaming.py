"""Text that is tokenised on the fly: streams cut in lanes, and lanes cut in sequences, resumable after any of them.

A lane is a fixed part of the documents with a place of its own in them. There are as many lanes as the configuration
says, whatever the ranks and workers: these only own lanes, so what is drawn depends on neither.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from datasets import IterableDataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dmc.data.blend import blend_schedule
from dmc.data.text import TextSource
from dmc.data.tokenizer import Framing, encode_documents, framing_of

_BATCH_DOCUMENTS = 16


def open_lanes(sources: Sequence[TextSource], num_lanes: int) -> list[list[IterableDataset]]:
    """Cut streams in lanes: endless parts of every source, rows of `{"text": ...}`, together all of its documents.

    Lanes share out the files of each stream, or a parquet stream's row groups where it has fewer files than there are
    lanes. Of a stream with fewer of both, every lane reads all and keeps its part. There is no shuffle buffer: its
    content would be lost on resume.

    Args:
        sources: the streams.
        num_lanes: lanes; each that is read holds a file of every source open.
    Returns:
        The streams of each lane, in the order of `sources`.
    Raises:
        ValueError: there is no source, or a source is empty or has no such column.
    """
    if not sources:
        raise ValueError("No source to stream; pass at least one TextSource.")
    if num_lanes < 1:
        raise ValueError(f"num_lanes={num_lanes} must be at least 1.")
    parts = []
    for source in sources:
        stream = source.stream()
        if next(iter(stream), None) is None:
            raise ValueError(f"The corpus {source.label!r} is empty: no document is text. Check its path and column.")
        parts.append([part.repeat(None) for part in _split(stream, num_lanes)])
    return [list(streams) for streams in zip(*parts, strict=True)]


def _split(stream: IterableDataset, num_parts: int) -> list[IterableDataset]:
    if stream.num_shards < num_parts:
        stream = stream.reshard()
    if stream.num_shards >= num_parts:
        return [stream.shard(num_parts, part, contiguous=False) for part in range(num_parts)]
    return [  # copies, for a stream keeps its place in objects that it shares with what is made of it
        copy.deepcopy(stream).filter(_belongs, with_indices=True, fn_kwargs={"part": part, "num_parts": num_parts})
        for part in range(num_parts)
    ]


def _belongs(_: dict[str, Any], index: int, part: int, num_parts: int) -> bool:
    return index % num_parts == part


class Lane:
    """Draws sequences from the streams of a lane in exact proportions, each source's in its own order.

    The sources are not interleaved by `datasets`: that keeps threads of its own and waits 5 s when a stream is closed.
    """

    def __init__(
        self, readers: Sequence[StreamReader], shares: Sequence[int], phase: float, state: dict[str, Any] | None = None
    ) -> None:
        """Begin the lane, or go on where `state` was taken.

        Args:
            readers: one per source.
            shares: sequences of each source in one period of the blend, see `integer_shares`.
            phase: where in the period the lane begins, 0 <= phase < 1; other lanes begin elsewhere.
            state: what `state_dict` returned.
        """
        self.readers, self._schedule = readers, blend_schedule(shares)
        self._first = int(phase * len(self._schedule))
        self._num_drawn = 0
        if state is not None:
            self._num_drawn = state["num_drawn"]
            for reader, place in zip(readers, state["sources"], strict=True):
                reader.load_state_dict(place)

    def draw(self) -> Tensor:
        """Return the next sequence, int64 [sequence_length].

        Raises:
            StopIteration: the lane has no document of the source whose turn it is.
        """
        source = self._schedule[(self._first + self._num_drawn) % len(self._schedule)]
        sequence = next(self.readers[source])
        self._num_drawn += 1
        return sequence

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the lane."""
        return {"num_drawn": self._num_drawn, "sources": [reader.state_dict() for reader in self.readers]}


class StreamReader(Iterator[Tensor]):
    """Tokenises one stream and cuts it in sequences, int64 [sequence_length]; documents end with the separator.

    Documents without text are left out (`num_skipped` of the state counts them).
    """

    def __init__(
        self,
        stream: IterableDataset,
        tokenizer: PreTrainedTokenizerBase,
        sequence_length: int,
        framing: Framing | None = None,
    ) -> None:
        """Begin the stream.

        Args:
            stream: rows of text, one of `open_lanes`.
            tokenizer: any tokenizer with an eos token, which ends each document.
            sequence_length: tokens of a sequence, >= 1.
            framing: what stands around each document; None: as in the pretraining of the tokenizer's model.
        Raises:
            ValueError: `sequence_length` < 1, or no eos token.
        """
        if sequence_length < 1:
            raise ValueError(f"sequence_length={sequence_length} must be at least 1.")
        self.stream, self.tokenizer, self.sequence_length = stream, tokenizer, sequence_length
        self.framing = framing or framing_of(tokenizer)
        self.load_state_dict(
            {
                "stream": None,  # the stream's own state before the batch of documents in work
                "remainder": [],  # token ids left over from before that batch, fewer than a sequence
                "num_yielded": 0,  # sequences already cut from remainder + batch
                "num_skipped": 0,  # empty documents before that batch
            }
        )

    def __next__(self) -> Tensor:
        return next(self._sequences)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the stream; its size is below one sequence plus the stream's own state."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the last sequence that `state` knows of."""
        self._state = state  # replaced, never changed
        self._sequences = self._cut()

    def _cut(self) -> Iterator[Tensor]:
        self.stream.load_state_dict(self._state["stream"])
        rows = iter(self.stream)
        while batch := list(itertools.islice(rows, _BATCH_DOCUMENTS)):
            texts = [text for text in map(_text_of, batch) if text.strip()]
            tokens = list(self._state["remainder"])
            for token_ids in encode_documents(self.tokenizer, texts):
                tokens += (*self.framing.begin, *token_ids, self.framing.end)
            num_sequences = len(tokens) // self.sequence_length
            for number in range(self._state["num_yielded"], num_sequences):
                start = number * self.sequence_length
                self._state = {**self._state, "num_yielded": number + 1}
                yield torch.tensor(tokens[start : start + self.sequence_length], dtype=torch.int64)
            self._state = {
                "stream": self.stream.state_dict(),
                "remainder": tokens[num_sequences * self.sequence_length :],
                "num_yielded": 0,
                "num_skipped": self._state["num_skipped"] + len(batch) - len(texts),
            }


def _text_of(row: dict[str, Any]) -> str:
    text = row["text"]
    if text is not None and not isinstance(text, str):
        raise TypeError(f"The stream holds {type(text).__name__}, expected text; set column=.")
    return text or ""
