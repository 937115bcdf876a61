"""Sequences packed on the fly from a stream of texts, resumable in mid-stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import datasets
import torch
from datasets.distributed import split_dataset_by_node
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from dmc.data.tokenizer import encode_documents, separator_id_of

_BATCH_DOCUMENTS = 16


class StreamingPacked(IterableDataset[dict[str, Any]]):
    """Tokenises a Hugging Face stream and cuts it in sequences, for a torchdata `StatefulDataLoader`.

    An item is `{"input_ids": int64 [sequence_length], "index": int, "position": int}`: `index` counts this worker's
    sequences, `position` is unique over all ranks and workers. The stream is split over ranks, then over workers by
    its shards (a worker without a shard stays idle). There is no shuffle buffer: its content would be lost on resume.
    The last tokens of the stream, fewer than a sequence, are left out, and so are empty documents (`num_skipped`).

    The state belongs to one rank and one worker and resumes only with the same number of both; `RankedLoader` saves the
    states of all ranks. Ranks reach the end of the stream after different numbers of sequences: train on several ranks
    with `open_stream(..., repeat=True)`.
    """

    def __init__(
        self,
        stream: datasets.IterableDataset,
        tokenizer: PreTrainedTokenizerBase,
        sequence_length: int,
        *,
        column: str = "text",
        rank: int = 0,
        world_size: int = 1,
        num_draws: int | None = None,
    ) -> None:
        """Split the stream for this rank.

        Args:
            stream: rows of text, for instance from `open_stream` or `load_dataset(..., streaming=True)`.
            tokenizer: any tokenizer with an eos token, which ends each document.
            sequence_length: tokens per item, >= 1.
            column: the column that holds the text.
            rank: this process, 0 <= rank < world_size.
            world_size: processes that share the stream.
            num_draws: samples drawn over the whole training by all ranks; gives the length that Lightning needs to
                save an exact state. It does not end the stream.
        Raises:
            ValueError: a number is outside its range, no such column, or no eos token.
        """
        if sequence_length < 1:
            raise ValueError(f"sequence_length={sequence_length} must be at least 1.")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must be at least 0 and below world_size={world_size}.")
        if stream.column_names is not None and column not in stream.column_names:
            raise ValueError(f"The stream has no column {column!r}; it has {sorted(stream.column_names)}. Set column=.")
        self.stream = split_dataset_by_node(stream, rank, world_size) if world_size > 1 else stream
        self.tokenizer = tokenizer
        self.separator_id = separator_id_of(tokenizer)
        self.sequence_length = sequence_length
        self.column = column
        self.rank = rank
        self.world_size = world_size
        self.num_draws = num_draws
        self._resume_from: dict[str, Any] | None = None
        self._state = self._initial_state()

    def _initial_state(self) -> dict[str, Any]:
        return {
            "stream": None,  # the stream's own state before the batch of documents in work
            "remainder": [],  # token ids left over from before that batch, fewer than a sequence
            "num_yielded": 0,  # sequences already cut from remainder + batch
            "index": 0,
            "num_skipped": 0,  # empty documents before that batch
            "rank": self.rank,
            "world_size": self.world_size,
        }

    @property
    def num_skipped(self) -> int:
        """Empty documents skipped so far by this worker, up to the batch of documents in work."""
        return self._state["num_skipped"]

    def __len__(self) -> int:
        if self.num_draws is None:
            raise TypeError("A stream has no length; pass num_draws to StreamingPacked to give it one.")
        return self.num_draws // self.world_size

    def state_dict(self) -> dict[str, Any]:
        """Return where this worker's stream stands; its size is below one sequence plus the stream's own state."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the next iteration after the last sequence that `state` knows of.

        Raises:
            ValueError: the state was saved by another rank or world size.
        """
        if (state["rank"], state["world_size"]) != (self.rank, self.world_size):
            raise ValueError(
                f"The stream state is of rank {state['rank']} of {state['world_size']}, this is rank {self.rank} of "
                f"{self.world_size}; a stream resumes only rank by rank at the same world size "
                "(packed datasets with ResumableOrder resume at any)."
            )
        self._resume_from = dict(state)
        self._state = dict(state)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._state, self._resume_from = self._resume_from or self._initial_state(), None
        self.stream.load_state_dict(self._state["stream"])
        return self._sequences()

    def _sequences(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        stride = worker.num_workers if worker else 1
        offset = worker.id if worker else 0
        rows = iter(self.stream)
        while batch := list(itertools.islice(rows, _BATCH_DOCUMENTS)):
            texts = [text for text in map(self._text_of, batch) if text.strip()]
            tokens = list(self._state["remainder"])
            for token_ids in encode_documents(self.tokenizer, texts):
                tokens += token_ids
                tokens.append(self.separator_id)
            num_sequences = len(tokens) // self.sequence_length
            for number in range(self._state["num_yielded"], num_sequences):
                start = number * self.sequence_length
                index = self._state["index"]
                self._state.update(num_yielded=number + 1, index=index + 1)
                yield {
                    "input_ids": torch.tensor(tokens[start : start + self.sequence_length], dtype=torch.int64),
                    "index": index,
                    "position": (index * stride + offset) * self.world_size + self.rank,
                }
            self._state.update(
                stream=self.stream.state_dict(),
                remainder=tokens[num_sequences * self.sequence_length :],
                num_yielded=0,
                num_skipped=self._state["num_skipped"] + len(batch) - len(texts),
            )

    def _text_of(self, row: dict[str, Any]) -> str:
        if self.column not in row:
            raise ValueError(f"The stream has no column {self.column!r}; it has {sorted(row)}. Set column=.")
        text = row[self.column]
        if text is not None and not isinstance(text, str):
            raise TypeError(f"Column {self.column!r} holds {type(text).__name__}, expected text; set column=.")
        return text or ""
