"""Token sequences whose ending can only be known by remembering their beginning."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.utils.data import Dataset

RecallTask = Literal["copy", "needle", "key_value"]

QUERY_ID, MARK_ID, NUM_MARKERS = 0, 1, 2


class RecallSequences(Dataset[dict[str, Any]]):
    """Generates random sequences that end in a query and its answer.

    An item is `{"input_ids": int64 [sequence_length], "index": int, "answer_start": int, "source_start": int}`: the
    `answer_length` tokens from `answer_start` to the end repeat those from `source_start` on. Token 0 asks, token 1
    marks what must be remembered, all others are drawn evenly. Item i is a pure function of (seed, i).

    * copy: `1 answer filler 0 answer`; the answer stands at the beginning.
    * needle: `filler 1 answer filler 0 answer`; the answer stands anywhere.
    * key_value: `1 key value 1 key value ... 0 key value`; keys are distinct, and one of them is asked for.
    """

    def __init__(
        self,
        task: RecallTask,
        *,
        num_sequences: int,
        sequence_length: int,
        vocab_size: int,
        answer_length: int = 4,
        seed: int = 0,
    ) -> None:
        """Check that the sequences have room for the task.

        Args:
            task: "copy", "needle" or "key_value".
            num_sequences: length of the dataset.
            sequence_length: tokens per sequence, query and answer included.
            vocab_size: token ids lie below it.
            answer_length: tokens of the answer.
            seed: selects the sequences.
        Raises:
            ValueError: the task is unknown, the sequence has no room, or the vocabulary too few keys.
        """
        if task not in get_args(RecallTask):
            raise ValueError(f"task={task!r} is unknown; choose one of {list(get_args(RecallTask))}.")
        # A mark and the answer, a query and the answer; key_value adds the key to both.
        shortest = 2 * (1 + answer_length + (task == "key_value"))
        if answer_length < 1 or sequence_length < shortest:
            raise ValueError(
                f"sequence_length={sequence_length} has no room for {task!r} with answer_length={answer_length}; "
                f"it needs answer_length >= 1 and sequence_length >= {shortest}."
            )
        self.task = task
        self.num_sequences = num_sequences
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.answer_length = answer_length
        self.seed = seed
        self._num_pairs = sequence_length // (2 + answer_length) - 1
        smallest = NUM_MARKERS + (self._num_pairs if task == "key_value" else 1)
        if vocab_size < smallest:
            raise ValueError(f"vocab_size={vocab_size} is too small for {task!r}; it needs at least {smallest}.")

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.num_sequences:
            raise IndexError(f"index={index} is outside the {self.num_sequences} sequences.")
        generator = np.random.default_rng([self.seed, index])
        tokens = generator.integers(NUM_MARKERS, self.vocab_size, size=self.sequence_length)
        answer_start = self.sequence_length - self.answer_length
        if self.task == "key_value":
            source_start = self._write_pairs(tokens, generator)
        else:
            last_mark = answer_start - 1 - (1 + self.answer_length)
            mark = 0 if self.task == "copy" else int(generator.integers(0, last_mark + 1))
            tokens[mark] = MARK_ID
            tokens[answer_start - 1] = QUERY_ID
            source_start = mark + 1
        tokens[answer_start:] = tokens[source_start : source_start + self.answer_length]
        return {
            "input_ids": torch.from_numpy(tokens),
            "index": int(index),
            "answer_start": answer_start,
            "source_start": source_start,
        }

    def _write_pairs(self, tokens: np.ndarray, generator: np.random.Generator) -> int:
        """Write marks, distinct keys and the query into random tokens; return where the asked value stands."""
        record = 2 + self.answer_length
        keys = NUM_MARKERS + generator.permutation(self.vocab_size - NUM_MARKERS)[: self._num_pairs]
        first = len(tokens) - record * (self._num_pairs + 1)  # filler before it
        marks = first + record * np.arange(self._num_pairs)
        tokens[marks] = MARK_ID
        tokens[marks + 1] = keys
        asked = int(generator.integers(0, self._num_pairs))
        tokens[-record : -record + 2] = (QUERY_ID, keys[asked])
        return int(marks[asked]) + 2
