"""Retrieval from text: a fact at a depth, a key's value, a sum's color, a number told turns before."""

from __future__ import annotations

import itertools
import random
import re
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, StrictInt
from typing_extensions import override

from dmc.config.settings import Count, checked_dataclass
from dmc.data import DocumentSource
from dmc.results.tasks.asking import Asking, Question, Turns
from dmc.results.tasks.base import Counts, Depths, Sample
from dmc.results.tasks.prompts import Encoder, Haystack, beginning_of_answer
from dmc.runtime import Engine, Generation, SamplingParams

NAMES = ("Lisbon", "Oslo", "Nairobi", "Lima", "Hanoi", "Quito", "Dublin", "Cairo", "Vienna", "Toronto", "Seoul", "Rome")
COLORS = (
    *("red", "green", "blue", "yellow", "orange", "purple", "pink", "brown", "black", "white", "gray", "cyan"),
    *("magenta", "indigo", "violet", "beige", "maroon", "navy", "olive", "teal", "lime", "silver", "gold"),
)


@checked_dataclass(frozen=True, kw_only=True)
class TextRecall(Asking):
    """Asks for something in the prompt: greedy generation, exact match, and the loss of the right answer.

    Raises:
        ValueError: a value is out of range.
    """

    samples_per_place: Count = 4
    """Number of samples at each coordinate of the grid."""
    max_new_tokens: Count = 24
    """Maximum tokens of a generated answer."""
    question: Question = "known"
    """Whether the cache is compressed with the question in the prompt. The text after its last question mark or line
    end, the same for every sample, is fed after that and predicts the answer's first token."""
    seed: StrictInt = 0
    stop: ClassVar[tuple[str, ...]] = ("\n",)
    """Strings that end an answer."""
    axes: ClassVar[dict[str, str]] = {"length": "lengths", "depth": "depths"}
    """Settings whose values span the grid of samples, by coordinate."""

    def extract(self, text: str) -> dict[str, str | None]:
        """Extract from an answer the text that each metric compares, or None; default: the first number."""
        return {"exact_match": first_number(text)}

    def grade(self, engine: Engine, answer: list[int], generation: Generation) -> dict[str, float]:
        """See `Asking.grade`: texts are compared."""
        wanted = self.extract(engine.tokenizer.decode(answer))
        found = self.extract(generation.text or "")
        return {name: float(found[name] is not None and found[name] == wanted[name]) for name in wanted}

    @override
    def params(self, max_new_tokens: int | None = None) -> SamplingParams:
        return SamplingParams(max_new_tokens=max_new_tokens or self.max_new_tokens, temperature=0.0, stop=self.stop)

    def texts(self, encoder: Encoder) -> list[list[int]]:
        """Return the filler of the samples at a place; default: none."""
        return [[]] * self.samples_per_place

    def ask(self, encoder: Encoder, place: dict[str, Any], number: int, text: list[int]) -> Sample:
        """Make the sample of a number at a place.

        Raises:
            ValueError: the place has no room for it.
        """
        raise NotImplementedError

    def samples(self, tokenizer: Any, vocab_size: int) -> list[Sample]:
        """See `Task.samples`; samples over the same window of a source share their context."""
        encoder = Encoder(tokenizer)
        texts, found = self.texts(encoder), list[Sample]()
        is_source = isinstance(getattr(self, "haystack", None), DocumentSource)
        for values in itertools.product(*(getattr(self, setting) for setting in self.axes.values())):
            place = dict(zip(self.axes, values, strict=True))
            for number, text in enumerate(texts):
                sample = self.ask(encoder, place, number, text)
                found.append(replace(sample, context=texts.index(text)) if is_source else sample)
        return found

    def sample(
        self, tokens: list[int], asked: tuple[list[int], list[int]], answer: list[int], place: dict[str, Any]
    ) -> Sample:
        """Make a sample from the tokens to compress and the tokens to feed after that."""
        question, cue = asked
        if self.question == "known":
            return Sample([*tokens, *question], answer, place, after=cue)
        return Sample(tokens, answer, place, after=[*question, *cue])

    def random(self, *coordinates: object) -> random.Random:
        """Return the random generator of a sample."""
        return random.Random(f"{self.seed} {coordinates}")


def first_number(text: str) -> str | None:
    """Return the first run of digits."""
    found = re.search(r"\d+", text)
    return found[0] if found else None


@checked_dataclass(frozen=True, kw_only=True)
class Needle(TextRecall):
    """Asks for a number at `depths` of texts of `lengths`: needle in a haystack, and passkey.

    A row keeps the grid `by_length_and_depth`.
    """

    haystack: Haystack
    """A source of documents, or a text that is repeated."""
    lengths: Counts = (512, 1024)
    """Tokens of prompts, the question included."""
    depths: Depths = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Position of the fact in the text."""
    fact: str = "\nThe magic number of {name} is {number}.\n"
    question_text: str = "\nWhat is the magic number of {name}? The magic number is"
    digits: Count = 5
    """Digits of the number."""
    questions_per_context: Annotated[StrictInt, Field(ge=1, le=len(NAMES))] = 1
    """Facts in a text, each with a name and a depth of its own; all are asked for. A text with hidden questions is read
    once, and is one context: the number of independent samples is that of texts."""
    cache_folder: str = "outputs/cache"
    """Folder of tokenized text."""

    def __post_init__(self) -> None:
        if len({*self.depths}) % self.questions_per_context:
            raise ValueError(
                f"questions_per_context={self.questions_per_context}: expected a divisor of the number of depths, "
                f"{len({*self.depths})}"
            )
        if self.questions_per_context > 1 and not all("{name}" in text for text in (self.fact, self.question_text)):
            raise ValueError(
                f"questions_per_context={self.questions_per_context}: expected {{name}} in fact and question_text, to "
                "tell the facts of a text apart"
            )
        start = beginning_of_answer(self.question_text)
        if not start.strip() or ("{" in start and self.question == "known" and self.questions_per_context == 1):
            raise ValueError(
                f"question_text={self.question_text!r}: expected the beginning of the answer behind the last question "
                "mark or line end, of a known question without names in braces: it is fed after the cache is compressed"
            )
        if "{number}" not in self.fact:
            raise ValueError(f"fact={self.fact!r}: expected {{number}} somewhere, and {{name}} if you like")

    @override
    def texts(self, encoder: Encoder) -> list[list[int]]:
        return encoder.filler(self.haystack, max(self.lengths), self.samples_per_place, self.cache_folder)

    @override
    def ask(self, encoder: Encoder, place: dict[str, Any], number: int, text: list[int]) -> Sample:
        length, depth = place["length"], place["depth"]
        together = self._depths_beside(depth)
        draw = self.random(length, depth if len(together) == 1 else together, number)
        names = draw.sample(NAMES, len(together))
        numbers = [draw.randrange(10 ** (self.digits - 1), 10**self.digits) for _ in together]
        said = [{"name": name, "number": value} for name, value in zip(names, numbers, strict=True)]
        facts = [encoder.encode(self.fact.format(**values)) for values in said]
        asks = [encoder.ask(self.question_text.format(**values)) for values in said]
        room = length - len(encoder.begin) - sum(map(len, facts)) - max(sum(map(len, asked)) for asked in asks)
        if room < 0:
            raise ValueError(f"lengths: {length} tokens leave no room for fact and question: give {length - room}")
        context, begin = [*encoder.begin], 0
        for fact, beside in zip(facts, together, strict=True):
            cut = round(beside * room)
            context += [*text[begin:cut], *fact]
            begin = cut
        context += text[begin:room]
        mine = together.index(depth)
        sample = self.sample(context, asks[mine], encoder.encode(f" {numbers[mine]}"), place)
        return sample if len(together) == 1 else replace(sample, context=(length, together, number))

    def _depths_beside(self, depth: float) -> tuple[float, ...]:
        """Return the depths whose facts share a text with that of a depth, which is one of them; ascending."""
        depths = sorted({*self.depths})
        groups = len(depths) // self.questions_per_context
        return tuple(depths[depths.index(depth) % groups :: groups])


@checked_dataclass(frozen=True, kw_only=True)
class KeyValuePairs(TextRecall):
    """Asks for the value of one key of a JSON object of UUIDs (Liu et al., arXiv:2307.03172).

    A row keeps the grid `by_length_and_depth`.
    """

    lengths: Counts = (1024, 2048)
    """Maximum tokens of prompts, which hold as many pairs as fit."""
    depths: Depths = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Position of the requested pair: 0 is the first, 1 the last."""
    max_new_tokens: Count = 64
    stop: ClassVar[tuple[str, ...]] = ('"', "\n")
    opening: ClassVar[str] = (
        "The JSON object below maps keys to values. Answer with the value of the key that is asked for.\n\n{"
    )
    asks: ClassVar[str] = '}}\n\nKey: "{key}"\nValue: "'

    def extract(self, text: str) -> dict[str, str | None]:
        """See `TextRecall.extract`: the text before the closing quote."""
        return {"exact_match": text.split('"')[0].strip() or None}

    @override
    def ask(self, encoder: Encoder, place: dict[str, Any], number: int, text: list[int]) -> Sample:
        length, depth = place["length"], place["depth"]
        draw = self.random(length, number)  # the same pairs at every depth
        context = [*encoder.begin, *encoder.encode(self.opening)]
        pairs: list[tuple[str, str]] = []
        longest = 0
        while True:
            key, value = [str(uuid.UUID(int=draw.getrandbits(128), version=4)) for _ in range(2)]
            piece = encoder.encode(f'"{key}": "{value}",\n')
            longest = max(longest, sum(map(len, encoder.ask(self.asks.format(key=key)))))  # any key may be requested
            if len(context) + len(piece) + longest > length:
                break
            pairs.append((key, value))
            context += piece
        if not pairs:
            raise ValueError(f"lengths: {length} tokens leave no room for a single pair of UUIDs: give more")
        key, value = pairs[round(depth * (len(pairs) - 1))]
        asked, answer = encoder.ask(self.asks.format(key=key)), encoder.encode(f'{value}"')
        return replace(self.sample(context, asked, answer, place), context=(length, number))


@checked_dataclass(frozen=True, kw_only=True)
class TwoStageRetrieval(TextRecall):
    """Asks for a dictionary's color of the sum of two numbers: OmniKV's 2StageRetr.

    The second stage depends on the first: with a chain of thought the model first writes the sum (`sum_match`), then
    looks up its entry. Differs from the authors' data: the wording, prompts that end where the answer begins, so that
    base models can answer, and exact match of the first color named, where theirs may be anywhere in the answer. A row
    has metrics `by_entries`.
    """

    entries: Counts = (40, 50, 60, 70, 80, 90, 100, 140, 180, 200)
    """Entries of the dictionary; the authors' sizes."""
    chain_of_thought: StrictBool = True
    samples_per_place: Count = 15
    max_new_tokens: Count = 48
    stop: ClassVar[tuple[str, ...]] = ("\n\n",)
    axes: ClassVar[dict[str, str]] = {"entries": "entries"}

    def extract(self, text: str) -> dict[str, str | None]:
        """See `TextRecall.extract`: the first color named, and the first number."""
        found = re.search(rf"\b({'|'.join(COLORS)})\b", text.lower())
        color = {"exact_match": found[0] if found else None}
        return color | {"sum_match": first_number(text)} if self.chain_of_thought else color

    @override
    def ask(self, encoder: Encoder, place: dict[str, Any], number: int, text: list[int]) -> Sample:
        size, draw = place["entries"], self.random(place["entries"], number)
        colors = draw.choices(COLORS, k=size)
        total = draw.randrange(size)
        first = draw.randint(0, total)
        dictionary = ", ".join(f"{key}: {color}" for key, color in enumerate(colors))
        equation = f"{first} + {total - first}"
        context = encoder.encode(f"This dictionary gives every number a color: {{{dictionary}}}\n")
        if self.chain_of_thought:
            question = f"Compute {equation}, then name the color of the result.\nAnswer: the result is"
            answer = f" {total}. The color of {total} is {colors[total]}."
        else:
            question = f"Name the color of {equation}.\nAnswer: the color is"
            answer = f" {colors[total]}."
        asked = encoder.ask(question)
        return self.sample([*encoder.begin, *context], asked, encoder.encode(answer), place)


@checked_dataclass(frozen=True, kw_only=True)
class MultiTurnRecall(TextRecall):
    """States a number in turn 1 and asks for it in turn k, with text and the model's replies in between.

    Each turn sees the cache that the one before has compressed, see `Turns`. A row has metrics `by_turn`.
    """

    haystack: Haystack
    """Text in between: a source of documents, or a text that is repeated."""
    turns: Annotated[Sequence[Annotated[StrictInt, Field(ge=2)]], Field(min_length=1)] = (2, 4, 8)
    """Turns in which the question is asked; the first turn is 1."""
    turn_tokens: Count = 128
    """Tokens of filler in each turn before."""
    reply_tokens: Count = 8
    """Tokens of each reply before the answer."""
    fact: str = "The door code of {name} is {number}. Remember it.\n"
    question_text: str = "\nWhat is the door code of {name}? The door code of {name} is"
    question: Literal["hidden"] = "hidden"
    """Always hidden: the earlier turns are compressed before the question."""
    cache_folder: str = "outputs/cache"
    axes: ClassVar[dict[str, str]] = {"turn": "turns"}

    @override
    def texts(self, encoder: Encoder) -> list[list[int]]:
        most = (max(self.turns) - 1) * self.turn_tokens
        return encoder.filler(self.haystack, most, self.samples_per_place, self.cache_folder)

    @override
    def ask(self, encoder: Encoder, place: dict[str, Any], number: int, text: list[int]) -> Turns:
        turn, draw = place["turn"], self.random(place["turn"], number)
        values = {"name": draw.choice(NAMES), "number": draw.randrange(10_000, 100_000)}
        fillers = [text[begin : begin + self.turn_tokens] for begin in range(0, len(text), self.turn_tokens)]
        fillers[0] = [*encoder.begin, *encoder.encode(self.fact.format(**values)), *fillers[0]]
        asked, start = encoder.ask(self.question_text.format(**values))
        turns = [*fillers[: turn - 1], [*asked, *start]]
        prompt = [token for turn in turns for token in turn]
        answer, reply = encoder.encode(f" {values['number']}"), self.params(self.reply_tokens)
        return Turns(prompt, answer, place, turns=turns, answers={turn - 1: answer}, reply=reply)
