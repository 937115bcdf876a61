"""Synthetic token sequences whose ending can only be predicted by remembering their beginning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

RecallTask = Literal["copy", "needle", "key_value"]

QUERY_ID, MARK_ID, NUM_MARKERS = 0, 1, 2


class RecallSequence(NamedTuple):
    """A sequence whose tokens from `answer_start` to the end repeat those from `source_start` on."""

    tokens: list[int]
    answer_start: int
    source_start: int


@dataclass(frozen=True)
class RecallSequences:
    """Draws random sequences that end in a query and its answer; number i is a pure function of (seed, i).

    Token 0 asks, token 1 marks the tokens to remember, all others are drawn uniformly.

    * copy: `1 answer filler 0 answer`; the answer is at the beginning.
    * needle: `filler 1 answer filler 0 answer`; the answer is anywhere.
    * key_value: `1 key value 1 key value ... 0 key value`; keys are distinct, and one of them is asked for.

    Raises:
        ValueError: the task is unknown, the sequence has no room, or the vocabulary too few keys.
    """

    task: RecallTask
    sequence_length: int
    """Number of tokens, query and answer included."""
    vocab_size: int
    """Token ids are below it."""
    answer_length: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        task, length = self.task, self.answer_length
        if task not in get_args(RecallTask):
            raise ValueError(f"task={task!r} is unknown; choose one of {list(get_args(RecallTask))}.")
        # A mark and the answer, a query and the answer; key_value adds the key to both.
        shortest = 2 * (1 + length + (task == "key_value"))
        if length < 1 or self.sequence_length < shortest:
            raise ValueError(
                f"sequence_length={self.sequence_length} has no room for {task!r} with answer_length={length}; "
                f"it needs answer_length >= 1 and sequence_length >= {shortest}."
            )
        smallest = NUM_MARKERS + (self._num_pairs if task == "key_value" else 1)
        if self.vocab_size < smallest:
            raise ValueError(f"vocab_size={self.vocab_size} is too small for {task!r}; it needs at least {smallest}.")

    def __getitem__(self, index: int) -> RecallSequence:
        generator = np.random.default_rng([self.seed, index])
        tokens = generator.integers(NUM_MARKERS, self.vocab_size, size=self.sequence_length)
        answer_start = self.sequence_length - self.answer_length
        if self.task == "key_value":
            source_start = self._write_pairs(tokens, generator)
        else:
            last_mark = answer_start - 1 - (1 + self.answer_length)
            mark = 0 if self.task == "copy" else int(generator.integers(0, last_mark + 1))
            tokens[mark], tokens[answer_start - 1] = MARK_ID, QUERY_ID
            source_start = mark + 1
        tokens[answer_start:] = tokens[source_start : source_start + self.answer_length]
        return RecallSequence(tokens.tolist(), answer_start, source_start)

    @property
    def _num_pairs(self) -> int:
        return self.sequence_length // (2 + self.answer_length) - 1

    def _write_pairs(self, tokens: np.ndarray, generator: np.random.Generator) -> int:
        """Write marks, distinct keys and the query into random tokens; return the position of the asked value."""
        record = 2 + self.answer_length
        keys = NUM_MARKERS + generator.permutation(self.vocab_size - NUM_MARKERS)[: self._num_pairs]
        first = len(tokens) - record * (self._num_pairs + 1)  # filler before it
        marks = first + record * np.arange(self._num_pairs)
        tokens[marks] = MARK_ID
        tokens[marks + 1] = keys
        asked = int(generator.integers(0, self._num_pairs))
        tokens[-record : -record + 2] = (QUERY_ID, keys[asked])
        return int(marks[asked]) + 2
