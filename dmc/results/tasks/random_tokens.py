"""Recall of random tokens, which can only be predicted by remembering them; no tokenizer is needed."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import StrictInt

from dmc.results.tasks.asking import Asking, Question
from dmc.results.tasks.base import Sample
from dmc.runtime import SamplingParams
from dmc.settings import Count, checked_dataclass

QUERY_ID, MARK_ID, NUM_MARKERS = 0, 1, 2


@checked_dataclass(frozen=True)
class Recall(Asking):
    """Asks to repeat tokens from far back among random tokens; sample i is a pure function of (seed, i).

    Token 0 asks, token 1 marks the tokens to remember, all others are drawn uniformly.

    * copy: `1 answer filler 0 answer`; the answer is at the beginning.
    * needle: `filler 1 answer filler 0 answer`; the answer is anywhere.
    * key_value: `1 key value 1 key value ... 0 key value`; keys are distinct, and one of them is asked for.

    The query is fed after the cache has compressed the tokens before it. For `key_value` the query is also part of the
    compressed prompt, unless `question="hidden"`. The query of the other tasks is the same for every sample.

    A row has the grid `by_length_and_depth`; the depth is the position of the answer, to a tenth of the prompt.

    Raises:
        ValueError: a value is out of range, or a sequence has no room.
    """

    task: Literal["copy", "needle", "key_value"]
    num_samples: Count = 32
    sequence_length: Count = 1024
    """Number of tokens of prompt and answer."""
    answer_length: Count = 4
    vocab_size: StrictInt | None = None
    """Tokens are drawn below it; None: from the model's whole vocabulary."""
    question: Question = "known"
    seed: StrictInt = 0

    def __post_init__(self) -> None:
        if self.sequence_length < 2 * self._record:
            raise ValueError(
                f"sequence_length={self.sequence_length} has no room for {self.task!r} with "
                f"answer_length={self.answer_length}; it needs sequence_length >= {2 * self._record}"
            )
        self._check_vocabulary(2**31 if self.vocab_size is None else self.vocab_size)

    @property
    def _record(self) -> int:
        """Tokens of a mark, a key if there are any, and an answer."""
        return 1 + (self.task == "key_value") + self.answer_length

    @property
    def _num_pairs(self) -> int:
        return self.sequence_length // self._record - 1

    def _check_vocabulary(self, size: int) -> None:
        smallest = NUM_MARKERS + (self._num_pairs if self.task == "key_value" else 1)
        if size < smallest:
            raise ValueError(f"vocab_size={size} is too small for {self.task!r}; it needs at least {smallest}")

    def params(self) -> SamplingParams:
        """See `Asking.params`."""
        return SamplingParams(max_new_tokens=self.answer_length, temperature=0.0, ignore_eos=True)

    def samples(self, tokenizer: Any, vocab_size: int) -> list[Sample]:
        """See `Task.samples`."""
        if self.vocab_size is not None and self.vocab_size > vocab_size:
            raise ValueError(f"{self.task}: vocab_size={self.vocab_size}, the model knows only {vocab_size} tokens")
        size = self.vocab_size or vocab_size
        self._check_vocabulary(size)
        return [self._sample(np.random.default_rng([self.seed, index]), size) for index in range(self.num_samples)]

    def _sample(self, draw: np.random.Generator, vocab_size: int) -> Sample:
        drawn = draw.integers(NUM_MARKERS, vocab_size, size=self.sequence_length)
        start = self.sequence_length - self.answer_length
        has_keys = self.task == "key_value"
        source = self._write_pairs(drawn, draw, vocab_size) if has_keys else self._write_mark(drawn, draw, start)
        tokens, asked = drawn.tolist(), start - 1 - has_keys
        coordinates = {"length": self.sequence_length, "depth": round(source / start, 1)}
        end = start if has_keys and self.question == "known" else asked
        return Sample(
            tokens[:end], tokens[source : source + self.answer_length], coordinates, after=tokens[asked:start]
        )

    def _write_mark(self, tokens: np.ndarray, draw: np.random.Generator, start: int) -> int:
        """Write a mark and the query into random tokens; return the position of the answer."""
        mark = 0 if self.task == "copy" else int(draw.integers(0, start - self._record))
        tokens[mark], tokens[start - 1] = MARK_ID, QUERY_ID
        return mark + 1

    def _write_pairs(self, tokens: np.ndarray, draw: np.random.Generator, vocab_size: int) -> int:
        """Write marks, distinct keys and the query into random tokens; return the position of the answer."""
        keys = NUM_MARKERS + draw.permutation(vocab_size - NUM_MARKERS)[: self._num_pairs]
        first = len(tokens) - self._record * (self._num_pairs + 1)  # filler before it
        marks = first + self._record * np.arange(self._num_pairs)
        tokens[marks] = MARK_ID
        tokens[marks + 1] = keys
        asked = int(draw.integers(0, self._num_pairs))
        tokens[-self._record : -self._record + 2] = (QUERY_ID, keys[asked])
        return int(marks[asked]) + 2
