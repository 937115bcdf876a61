"""Facts and questions about them, written into text: training and evaluation data for retrieval.

A fact gives a key its value, `set KEY VALUE`; a question names the key again, `get KEY`. Values are common words of
one token each, so that an answer is one token; keys are one or several such words. A model of a million parameters
stays at a guess among the values for as long as it trained here, unless lessons come first: random tokens that come
twice, then few keys close together, then more of them further apart. So it takes minutes.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence, Sized
from typing import Any, TypeVar, get_args

import numpy as np
import torch
from torch.utils.data import Dataset

from dmc.data.config import FactsConfig, LessonConfig, Words
from dmc.data.order import Blend, Shuffled
from dmc.data.packing import PackedTokens

SEEN_FORMS = (
    "\nset{key}{value}",
    "\n{key} ={value}",
    "\n({key}:{value})",
    " a{key} is{value};",
    "\n{key} ->{value}",
    "\nput{key} in{value}",
    "\n#{key} to{value}",
    "\n@{key}.{value}",
)
"""Forms of facts in training."""
UNSEEN_FORMS = ("\nuse{key} as{value}", "\n<{key}/{value}>", "{key} by{value},", "\n%{key} |{value}")
"""Forms that no training shows: a compressor that keeps such facts has not merely memorized markers."""
QUESTION = "\nget{key}"
WORD = re.compile(r" [a-z]{3,}")

Element = TypeVar("Element")
Key = tuple[int, ...]
"""A key's tokens, one for each of its words."""
Weighted = tuple[int, float]
"""A token and its weight in the loss."""


def half(count: int, words: Words) -> slice:
    """Return the slice of `count` keys (and values) to use; both halves are equally large.

    Raises:
        ValueError: `words` is not one of `Words`.
    """
    if words not in get_args(Words):
        raise ValueError(f"words={words!r}: expected one of {', '.join(get_args(Words))}")
    size = count // 2
    return {"all": slice(None), "first_half": slice(size), "second_half": slice(size, 2 * size)}[words]


class FactWriter:
    """Writes facts and questions as tokens.

    Args:
        tokenizer: a tokenizer with enough words of one token.
        num_keys: number of words of keys and of values: the first words of the tokenizer, alternately; half of its
            words where it has fewer, as one trained on another Python's standard library may.
        words: the words to use; a half leaves the others unseen until evaluation.
        key_words: number of words of a key.
        keys: number of keys that are drawn together.
    Raises:
        ValueError: the tokenizer has too few such words for so many keys.
    """

    def __init__(
        self, tokenizer: Any, num_keys: int, words: Words = "all", key_words: int = 1, *, keys: int = 1
    ) -> None:
        pieces = ((token, tokenizer.decode([token])) for token in range(len(tokenizer)))
        known = [token for token, text in pieces if WORD.fullmatch(text)]
        count = min(num_keys, len(known) // 2)
        if count < num_keys:
            warnings.warn(f"num_keys={num_keys}: the tokenizer has words of one token for {count}", stacklevel=2)
        known = known[: 2 * count]
        self.keys, self.values = (tokens[half(count, words)] for tokens in (known[0::2], known[1::2]))
        if keys > (most := len(self.keys) ** key_words):
            raise ValueError(
                f"keys={keys}: expected at most {most}; the tokenizer has {len(known)} words of one token, of 3 "
                f"letters or more behind a space, for keys and values (words={words}, key_words={key_words})"
            )
        self.key_words, self._tokenizer = key_words, tokenizer
        self._seen, self._unseen = self._pieces(SEEN_FORMS), self._pieces(UNSEEN_FORMS)
        ((self._asking, _),) = self._pieces([QUESTION])

    def draw_keys(self, count: int, draw: np.random.Generator, of_keys: int | None = None) -> list[Key]:
        """Draw distinct keys of `of_keys` words: the first ones, for keys of several words any."""
        words = self.keys[:of_keys]
        if of_keys is not None and self.key_words > 1:
            words = draw.choice(self.keys, size=len(words), replace=False).tolist()
        shape = (len(words),) * self.key_words
        drawn = np.unravel_index(draw.choice(math.prod(shape), size=count, replace=False), shape)
        return [tuple(words[index] for index in key) for key in zip(*drawn, strict=True)]

    def fact(self, key: Key, value: int, draw: np.random.Generator, *, unseen: bool = False) -> list[int]:
        """Return a statement that a key has a value, in one of the forms."""
        forms = self._unseen if unseen else self._seen
        before, between, after = forms[draw.integers(len(forms))]
        return [*before, *key, *between, value, *after]

    def question(self, key: Key) -> list[int]:
        """Return a question for a key's value, which is the next token."""
        return [*self._asking, *key]

    def _pieces(self, forms: Sequence[str]) -> list[tuple[list[int], ...]]:
        texts = [re.split(r"\{key\}|\{value\}", form) for form in forms]
        return [tuple(self._encode(piece) for piece in pieces) for pieces in texts]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def weave(
    inserts: Sequence[Sequence[Element]], text: Sequence[Element], length: int, draw: np.random.Generator
) -> tuple[list[Element], list[int]]:
    """Insert sequences into a text, in order and spread evenly over it.

    Returns:
        `length` elements, and the index where each insert begins.
    Raises:
        ValueError: the inserts are longer than `length`, or the text is shorter than the rest.
    """
    room = length - sum(map(len, inserts))
    if not 0 <= room <= len(text):
        raise ValueError(f"{len(inserts)} facts and questions leave {room} of {length} tokens to {len(text)} of text")
    woven: list[Element] = []
    begins, used = [], 0
    for insert, place in zip(inserts, np.sort(draw.integers(0, room + 1, size=len(inserts))).tolist(), strict=True):
        woven += text[used:place]
        used = place
        begins.append(len(woven))
        woven += insert
    return [*woven, *text[used:room]], begins


class FactSequences(Dataset[dict[str, Any]]):
    """Text with facts and questions in it, endless and in random order: see `dmc.data.order`.

    An item is `{"input_ids": int64 [T], "loss_mask": float32 [T], "position": int}`: how much each token counts. While
    lessons are shorter than T it is several sequences, [T / length, length].

    Args:
        packed: the text.
        tokenizer: tokenizer of the text.
        facts: settings of the facts.
        sequence_length: T.
        keys: keys of the random draws: the run's seed, and a number of the split.
        has_lessons: whether the lessons come first; False: as after them, and every fact in a known form.
        has_questions: whether facts are asked for; False: each is said once, which is what a cache compresses.
    Raises:
        ValueError: the tokenizer has too few words, or a lesson does not divide T.
    """

    def __init__(
        self,
        packed: PackedTokens | Blend,
        tokenizer: Any,
        facts: FactsConfig,
        sequence_length: int,
        *,
        keys: tuple[int, ...] = (0,),
        has_lessons: bool = True,
        has_questions: bool = True,
    ) -> None:
        self.facts, self.sequence_length, self.keys = facts, sequence_length, keys
        self.text = Shuffled(packed, *keys) if isinstance(packed, Sized) else packed
        drawn = [facts.keys, *(lesson.keys for lesson in facts.lessons if has_lessons and lesson.kind != "copies")]
        self.writer = FactWriter(tokenizer, facts.num_keys, facts.words, facts.key_words, keys=max(drawn))
        self.vocab_size = len(tokenizer)
        self.lessons = list(facts.lessons) if has_lessons else []
        self.has_lessons, self.has_questions = has_lessons, has_questions
        for lesson in self.lessons:
            if sequence_length % lesson.length:
                raise ValueError(
                    f"data.facts.lessons: length={lesson.length} does not divide the {sequence_length} tokens of "
                    "training.sequence_length"
                )

    def lesson_at(self, position: int) -> LessonConfig:
        """Return the lesson at a position: after the last one, sequences have their full length."""
        for lesson in self.lessons:
            if position < lesson.sequences:
                return lesson
            position -= lesson.sequences
        return LessonConfig("facts", self.sequence_length, sequences=1, keys=self.facts.keys)

    def __getitem__(self, position: int) -> dict[str, Any]:
        draw = np.random.default_rng([*self.keys, position])
        lesson = self.lesson_at(position)
        number = self.sequence_length // lesson.length
        text = self._text_at(position)
        rows = []
        for row in range(number):
            if lesson.kind == "copies":
                rows.append(self._copies(lesson, draw))
            elif lesson.kind == "pairs":
                rows.append(self._pairs(lesson, draw))
            else:
                rows.append(self._facts(lesson, text[row * lesson.length : (row + 1) * lesson.length], draw))
        tokens = torch.tensor([[token for token, _ in row] for row in rows])
        weights = torch.tensor([[weight for _, weight in row] for row in rows])
        item = {"input_ids": tokens, "loss_mask": weights}
        return {**{name: rows if number > 1 else rows[0] for name, rows in item.items()}, "position": position}

    def _text_at(self, position: int) -> list[Weighted]:
        item = self.text[position]
        tokens = item["input_ids"].tolist()
        weights = item["loss_mask"].float().tolist() if "loss_mask" in item else [1.0] * len(tokens)
        return list(zip(tokens, weights, strict=True))

    def _copies(self, lesson: LessonConfig, draw: np.random.Generator) -> list[Weighted]:
        """Return random tokens that are repeated once; the repetition is trained on."""
        tokens = draw.integers(1, self.vocab_size, size=lesson.length // 2).tolist()
        return [*((token, 0.0) for token in tokens), *((token, 1.0) for token in tokens)]

    def _pairs(self, lesson: LessonConfig, draw: np.random.Generator) -> list[Weighted]:
        """Return key-value pairs without text, repeated in random orders; all values but the first are trained on."""
        pairs = self._drawn(lesson, draw)
        row: list[Weighted] = []
        while len(row) < lesson.length:
            again = bool(row)
            for number in draw.permutation(len(pairs)):
                key, value = pairs[number]
                has_gap = not again and lesson.of_keys is None and draw.random() < self.facts.random_forms
                between = self._noise(draw) if has_gap else []
                row += [(token, 0.0) for token in (*key, *between)] + [(value, float(again))]
        return row[: lesson.length]

    def _facts(self, lesson: LessonConfig, text: list[Weighted], draw: np.random.Generator) -> list[Weighted]:
        """Write facts and their questions into text; all is learned, and answers more than the rest."""
        if not self.has_questions:
            said = [self._fact(key, value, draw) for key, value in self._drawn(lesson, draw)]
            while sum(map(len, said)) > lesson.length:
                said.pop()
            return weave(said, text, lesson.length, draw)[0]
        events: list[tuple[float, list[Weighted]]] = []
        delay = float(draw.random() < self.facts.asked_last)
        for key, value in self._drawn(lesson, draw):
            before, then, later = np.sort(draw.random(3)).tolist()
            if draw.random() < self.facts.rebinding:
                events.append((before, self._fact(key, self._value(draw), draw)))
            events.append((then, self._fact(key, value, draw)))
            times = 2 if self.has_lessons and draw.random() < self.facts.asked_twice else 1
            asked = [(token, 1.0) for token in self.writer.question(key) * times]
            events.append((later + delay, [*asked, (value, self.facts.answer_weight)]))
        inserts = [insert for _, insert in sorted(events, key=lambda event: event[0])]
        while sum(map(len, inserts)) > lesson.length:
            inserts.pop()
        return weave(inserts, text, lesson.length, draw)[0]

    def _drawn(self, lesson: LessonConfig, draw: np.random.Generator) -> list[tuple[Key, int]]:
        """Draw distinct keys, and a value for each."""
        return [(key, self._value(draw)) for key in self.writer.draw_keys(lesson.keys, draw, lesson.of_keys)]

    def _value(self, draw: np.random.Generator) -> int:
        return self.writer.values[draw.integers(len(self.writer.values))]

    def _fact(self, key: Key, value: int, draw: np.random.Generator) -> list[Weighted]:
        """Write a fact, in lessons partly among random tokens, so that its form does not matter."""
        if self.has_lessons and draw.random() < self.facts.random_forms:
            tokens = [*self._noise(draw), *key, *self._noise(draw), value, *self._noise(draw)]
        else:
            tokens = self.writer.fact(key, value, draw)
        return [(token, 1.0) for token in tokens]

    def _noise(self, draw: np.random.Generator) -> list[int]:
        return draw.integers(1, self.vocab_size, size=draw.integers(3)).tolist()
