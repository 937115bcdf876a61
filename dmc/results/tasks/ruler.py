"""Tasks of RULER (arXiv:2404.06654) that make their own data: needles, variables, common and frequent words.

They differ from the authors' data in four ways. Lengths count a prompt with its question. Keys and words come from
lists of this project. A haystack is a text of your own, or the authors' repeated sentences. All keys or chains of a
context can be asked for, each in a question of its own.
"""

from __future__ import annotations

import itertools
import random
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field, StrictInt
from typing_extensions import override

from dmc.config.settings import Count, checked_dataclass
from dmc.data.lists import nouns
from dmc.results.tasks.base import Counts, Sample
from dmc.results.tasks.prompts import Encoder, Haystack
from dmc.results.tasks.retrieval import COLORS, NAMES, TextRecall
from dmc.runtime import Engine, Generation

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"


@checked_dataclass(frozen=True, kw_only=True)
class Ruler(TextRecall):
    """A task whose answer is a list: `string_match` is the share of its items that the answer has anywhere."""

    main_metric = "string_match"
    lengths: Counts = (1024,)
    """Tokens of prompts, the question included."""
    samples_per_place: Count = 25
    """Contexts of each length."""
    axes: ClassVar[dict[str, str]] = {"length": "lengths"}
    stop: ClassVar[tuple[str, ...]] = ("\n\n",)

    @override
    def grade(self, engine: Engine, answer: list[int], generation: Generation) -> dict[str, float]:
        wanted = re.findall(r"\w+", engine.tokenizer.decode(answer))
        said = (generation.text or "").lower()
        return {"string_match": sum(item.lower() in said for item in wanted) / len(wanted)}

    @override
    def samples(self, tokenizer: Any, vocab_size: int) -> list[Sample]:
        encoder, found = Encoder(tokenizer), list[Sample]()
        for length, (number, text) in itertools.product(self.lengths, enumerate(self.texts(encoder))):
            context, asked = self.write(encoder, length, text, self.random(length, number))
            for question, items in asked:
                answer = encoder.encode(" " + ", ".join(items))
                sample = self.sample(context, encoder.ask(question), answer, {"length": length})
                found.append(replace(sample, context=number))
        return found

    def write(
        self, encoder: Encoder, length: int, text: list[int], draw: random.Random
    ) -> tuple[list[int], list[tuple[str, list[str]]]]:
        """Write a context, and the questions about it with the items of their answers.

        Raises:
            ValueError: the length has no room for it.
        """
        raise NotImplementedError


def room_beside(encoder: Encoder, length: int, pieces: Sequence[list[int]], questions: Sequence[str]) -> int:
    """Return how many tokens are left beside pieces of a context and the longest of its questions.

    Raises:
        ValueError: there are fewer than none.
    """
    longest = max(sum(map(len, encoder.ask(question))) for question in questions)
    room = length - len(encoder.begin) - sum(map(len, pieces)) - longest
    if room < 0:
        raise ValueError(f"lengths: {length} tokens leave no room for context and question: give {length - room}")
    return room


def scattered(pieces: Sequence[list[int]], text: list[int], draw: random.Random) -> list[int]:
    """Put pieces into a text in their order, at random places."""
    places = sorted(draw.randint(0, len(text)) for _ in pieces)
    found, begin = list[int](), 0
    for place, piece in zip(places, pieces, strict=True):
        found += [*text[begin:place], *piece]
        begin = place
    return found + text[begin:]


@checked_dataclass(frozen=True, kw_only=True)
class RulerNeedles(Ruler):
    """Asks for the numbers of keys: RULER's niah_single (1 key), multikey (more), multivalue (more values)."""

    haystack: Haystack = NOISE
    """A source of documents, or a text that is repeated."""
    keys: Annotated[StrictInt, Field(ge=1, le=len(NAMES))] = 1
    values: Annotated[StrictInt, Field(ge=1, le=8)] = 1
    """Numbers of a key."""
    questions: Count = 1
    """Keys of a context that are asked for, at most all."""
    digits: Count = 7
    max_new_tokens: Count = 48
    cache_folder: str = "outputs/cache"
    """Folder of tokenized text."""
    intro: ClassVar[str] = (
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you "
        "about the numbers afterwards.\n"
    )
    question_text: ClassVar[str] = (
        "\nWhat are all the special magic numbers for {key} mentioned in the provided text? "
        "The special magic numbers for {key} mentioned in the provided text are"
    )

    def __post_init__(self) -> None:
        if self.questions > self.keys:
            raise ValueError(f"questions={self.questions}: expected at most the keys={self.keys} of a context")

    @override
    def texts(self, encoder: Encoder) -> list[list[int]]:
        return encoder.filler(self.haystack, max(self.lengths), self.samples_per_place, self.cache_folder)

    @override
    def write(
        self, encoder: Encoder, length: int, text: list[int], draw: random.Random
    ) -> tuple[list[int], list[tuple[str, list[str]]]]:
        names = [f"{draw.choice(COLORS)}-{name.lower()}" for name in draw.sample(NAMES, self.keys)]
        low, high = 10 ** (self.digits - 1), 10**self.digits
        numbers = {name: [str(draw.randrange(low, high)) for _ in range(self.values)] for name in names}
        facts = [(name, value) for name, values in numbers.items() for value in values]
        draw.shuffle(facts)
        needles = [
            encoder.encode(f"\nOne of the special magic numbers for {key} is: {value}.\n") for key, value in facts
        ]
        intro, asked = encoder.encode(self.intro), [*numbers.items()][: self.questions]
        questions = [self.question_text.format(key=name) for name, _ in asked]
        room = room_beside(encoder, length, [intro, *needles], questions)
        context = [*encoder.begin, *intro, *scattered(needles, text[:room], draw)]
        return context, [(question, values) for question, (_, values) in zip(questions, asked, strict=True)]


@checked_dataclass(frozen=True, kw_only=True)
class VariableTracking(Ruler):
    """Asks for all variables that have a value by a chain of assignments; an example comes first."""

    chains: Annotated[StrictInt, Field(ge=1, le=8)] = 1
    """Chains of a context, all of which are asked for."""
    hops: Annotated[StrictInt, Field(ge=1, le=10)] = 4
    """Assignments after the first of a chain."""
    max_new_tokens: Count = 30
    intro: ClassVar[str] = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    question_text: ClassVar[str] = (
        "\nQuestion: Find all variables that are assigned the value {value} in the text above.\n"
        "Answer: According to the chain(s) of variable assignment in the text above, the variables are:"
    )

    @override
    def write(
        self, encoder: Encoder, length: int, text: list[int], draw: random.Random
    ) -> tuple[list[int], list[tuple[str, list[str]]]]:
        noise = encoder.encode(NOISE)
        ((value, names),), pieces = self._chains(encoder, 1, 3, draw)
        example = [*encoder.encode(self.intro), *scattered_lines(pieces, [noise] * 5, draw)]
        example += encoder.encode(f"{self.question_text.format(value=value)} {', '.join(names)}\n\n")
        chains, pieces = self._chains(encoder, self.chains, 5, draw)
        questions = [self.question_text.format(value=value) for value, _ in chains]
        intro = encoder.encode(self.intro)
        room = room_beside(encoder, length, [example, intro, *pieces], questions)
        lines = scattered_lines(pieces, [noise] * (room // len(noise)), draw)
        context = [*encoder.begin, *example, *intro, *lines]
        return context, [(question, names) for question, (_, names) in zip(questions, chains, strict=True)]

    def _chains(
        self, encoder: Encoder, count: int, letters: int, draw: random.Random
    ) -> tuple[list[tuple[str, list[str]]], list[list[int]]]:
        """Draw chains: the value and the variables of each, and their assignments, in turn."""
        names = list[str]()
        while len(names) < count * (self.hops + 1):
            name = "".join(draw.choices(string.ascii_uppercase, k=letters))
            names += [] if name in names else [name]
        values = [str(value) for value in draw.sample(range(10_000, 99_999), count)]
        chains = [(value, names[index::count]) for index, value in enumerate(values)]
        lines = []
        for step in range(self.hops + 1):
            for value, variables in chains:
                lines.append(f"VAR {variables[step]} = {value if step == 0 else f'VAR {variables[step - 1]}'}\n")
        return chains, [encoder.encode(line) for line in lines]


def scattered_lines(pieces: Sequence[list[int]], lines: list[list[int]], draw: random.Random) -> list[int]:
    """Put pieces between lines, in their order."""
    places = sorted(draw.randint(0, len(lines)) for _ in pieces)
    found = list[int]()
    for number in range(len(lines) + 1):
        found += [token for place, piece in zip(places, pieces, strict=True) if place == number for token in piece]
        found += lines[number] if number < len(lines) else []
    return found


@checked_dataclass(frozen=True, kw_only=True)
class CommonWords(Ruler):
    """Asks for the most common of a numbered list of words; an example comes first."""

    common: Count = 10
    """Number of common words."""
    repeats: Annotated[StrictInt, Field(ge=2)] = 6
    """Times that a common word is in the list; any other is there once."""
    max_new_tokens: Count = 80
    stop: ClassVar[tuple[str, ...]] = ("\n",)
    intro: ClassVar[str] = (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        "appear most often.\n"
    )

    @override
    def write(
        self, encoder: Encoder, length: int, text: list[int], draw: random.Random
    ) -> tuple[list[int], list[tuple[str, list[str]]]]:
        question = f"\nQuestion: What are the {self.common} most common words in the above list?\n"
        question += f"Answer: The top {self.common} words that appear most often in the list are:"
        shown, best = self._list(10, 3, draw)
        example = encoder.encode(f"{self.intro}{shown}{question} {', '.join(best)}\n\n{self.intro}")
        room, fits = room_beside(encoder, length, [example], [question]), None
        state = draw.getstate()
        for others in range(len(nouns()) - self.common, -1, -10):
            draw.setstate(state)
            shown, words = self._list(others, self.repeats, draw)
            if len(shown) <= 8 * room and len(tokens := encoder.encode(shown)) <= room:
                fits = tokens, words
                break
        if fits is None:
            raise ValueError(f"lengths: {length} tokens leave no room for common={self.common} words")
        return [*encoder.begin, *example, *fits[0]], [(question, fits[1])]

    def _list(self, others: int, repeats: int, draw: random.Random) -> tuple[str, list[str]]:
        """Draw a list with so many uncommon words, and the common ones."""
        words = draw.sample(nouns(), self.common + others)
        common = words[: self.common]
        items = common * repeats + words[self.common :]
        draw.shuffle(items)
        return " ".join(f"{number}. {word}" for number, word in enumerate(items, 1)), common


@checked_dataclass(frozen=True, kw_only=True)
class FrequentWords(Ruler):
    """Asks for the three most frequent of coded words, whose frequencies fall with the square of their rank."""

    max_new_tokens: Count = 40
    stop: ClassVar[tuple[str, ...]] = ("\n",)
    intro: ClassVar[str] = (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        "appeared coded words. "
    )
    question_text: ClassVar[str] = (
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text?\n"
        "Answer: According to the coded text above, the three most frequently appeared words are:"
    )

    @override
    def write(
        self, encoder: Encoder, length: int, text: list[int], draw: random.Random
    ) -> tuple[list[int], list[tuple[str, list[str]]]]:
        codes = ["".join(draw.choices(string.ascii_lowercase, k=6)) for _ in range(max(4, length // 50))]
        intro = encoder.encode(self.intro)
        room = room_beside(encoder, length, [intro], [self.question_text])
        words = [encoder.encode(f" {word}") for word in ("...", *codes)]
        total, chosen = 0, Counter[int]()
        for count in itertools.count(1):  # words in all, of which rank k has its share
            shares = [count / (rank**2 * 1.645) for rank in range(1, len(words) + 1)]
            trial = Counter({rank: int(share) for rank, share in enumerate(shares) if share >= 1})
            total = sum(len(words[rank]) * times for rank, times in trial.items())
            if total > room:
                break
            chosen = trial
        if chosen[3] == chosen[4]:
            raise ValueError(f"lengths: {length} tokens leave no room for three words of different frequency")
        items = [rank for rank, times in chosen.items() for _ in range(times)]
        draw.shuffle(items)
        context = [*encoder.begin, *intro, *(token for rank in items for token in words[rank])]
        return context, [(self.question_text, codes[:3])]
