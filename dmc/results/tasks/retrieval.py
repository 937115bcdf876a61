"""Retrieval from text: a fact at a depth, a key's value, a sum's color, a number told turns before."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, StrictInt

from dmc.results.tasks.asking import Asking, Question, Turns
from dmc.results.tasks.base import Counts, Depths, Sample
from dmc.results.tasks.prompts import Encoder, Haystack, beginning_of_answer
from dmc.runtime import Engine, Generation, SamplingParams
from dmc.settings import Count, checked_dataclass

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

    def extract(self, text: str) -> dict[str, str | None]:
        """Extract from an answer the text that each metric compares, or None; default: the first number."""
        return {"exact_match": first_number(text)}

    def grade(self, engine: Engine, answer: list[int], generation: Generation) -> dict[str, float]:
        """See `Asking.grade`: texts are compared."""
        wanted = self.extract(engine.tokenizer.decode(answer))
        found = self.extract(generation.text or "")
        return {name: float(found[name] is not None and found[name] == wanted[name]) for name in wanted}

    def params(self, max_new_tokens: int | None = None) -> SamplingParams:
        """See `Asking.params`."""
        return SamplingParams(max_new_tokens=max_new_tokens or self.max_new_tokens, temperature=0.0, stop=self.stop)

    def sample(
        self,
        tokens: list[int],
        asked: tuple[list[int], list[int]],
        answer: list[int],
        coordinates: dict[str, float],
        context: Any = None,
    ) -> Sample:
        """Make a sample from the tokens to compress and the tokens to feed after that."""
        question, cue = asked
        if self.question == "known":
            return Sample([*tokens, *question], answer, coordinates, after=cue, context=context)
        return Sample(tokens, answer, coordinates, after=[*question, *cue], context=context)

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
    shares_context: StrictBool = False
    """Whether one text holds the facts of all depths, each asked for by its own sample: several questions about one
    context."""
    cache_folder: str = "outputs/cache"
    """Folder of tokenized text."""

    def __post_init__(self) -> None:
        start = beginning_of_answer(self.question_text)
        if not start.strip() or "{" in start:
            raise ValueError(
                f"question_text={self.question_text!r}: expected the beginning of the answer behind the last question "
                "mark or line end, without names in braces: it is fed when the cache has been compressed"
            )
        if "{number}" not in self.fact:
            raise ValueError(f"fact={self.fact!r}: expected {{number}} somewhere, and {{name}} if you like")
        if self.shares_context and ("{name}" not in self.fact or len(self.depths) > len(NAMES)):
            raise ValueError(f"shares_context=true: expected {{name}} in fact, and at most {len(NAMES)} depths")

    def samples(self, tokenizer: Any, vocab_size: int) -> list[Sample]:
        """See `Task.samples`."""
        encoder = Encoder(tokenizer)
        texts = encoder.filler(self.haystack, max(self.lengths), self.samples_per_place, self.cache_folder)
        return [
            sample
            for length in self.lengths
            for depths in ([self.depths] if self.shares_context else [[depth] for depth in self.depths])
            for number, text in enumerate(texts)
            for sample in self._ask(encoder, text, length, depths, number, texts.index(text))
        ]

    def _ask(
        self, encoder: Encoder, text: list[int], length: int, depths: Sequence[float], number: int, source: int
    ) -> list[Sample]:
        """Hide one fact at each depth, and ask for each."""
        draw = self.random(length, *depths, number)
        names = draw.sample(NAMES, len(depths))
        numbers = [draw.randrange(10 ** (self.digits - 1), 10**self.digits) for _ in depths]
        said = [{"name": name, "number": each} for name, each in zip(names, numbers, strict=True)]
        facts = [encoder.encode(self.fact.format(**each)) for each in said]
        questions = [encoder.ask(self.question_text.format(**each)) for each in said]
        longest = max(sum(map(len, asked)) for asked in questions)
        room = length - len(encoder.begin) - sum(map(len, facts)) - longest
        if room < 0:
            raise ValueError(f"lengths: {length} tokens have no room for fact and question, at least {length - room}")
        context, last = list(encoder.begin), 0
        for depth, fact in sorted(zip(depths, facts, strict=True), key=lambda each: each[0]):
            cut = round(depth * room)
            context += [*text[last:cut], *fact]
            last = cut
        context += text[last:room]
        of_context = (length, *depths, number) if isinstance(self.haystack, str) else source
        return [
            self.sample(context, asked, encoder.encode(f" {each}"), {"length": length, "depth": depth}, of_context)
            for depth, each, asked in zip(depths, numbers, questions, strict=True)
        ]


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

    def samples(self, tokenizer: Any, vocab_size: int) -> list[Sample]:
        """See `Task.samples`."""
        encoder = Encoder(tokenizer)
        return [
            self._sample(encoder, length, depth, number)
            for length in self.lengths
            for depth in self.depths
            for number in range(self.samples_per_place)
        ]

    def _sample(self, encoder: Encoder, length: int, depth: float, number: int) -> Sample:
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
            raise ValueError(f"lengths: {length} tokens have no room for a single pair of UUIDs")
        key, value = pairs[round(depth * (len(pairs) - 1))]
        asked, answer = encoder.ask(self.asks.format(key=key)), encoder.encode(f'{value}"')
        return self.sample(context, asked, answer, {"length": length, "depth": depth}, (length, number))


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

    def extract(self, text: str) -> dict[str, str | None]:
        """See `TextRecall.extract`: the first color named, and the first number."""
        found = re.search(rf"\b({'|'.join(COLORS)})\b", text.lower())
        color = {"exact_match": found[0] if found else None}
        return color | {"sum_match": first_number(text)} if self.chain_of_thought else color

    def samples(self, tokenizer: Any, vocab_size: int) -> list[Sample]:
        """See `Task.samples`."""
        encoder = Encoder(tokenizer)
        places = [(size, number) for size in self.entries for number in range(self.samples_per_place)]
        return [self._sample(encoder, size, number) for size, number in places]

    def _sample(self, encoder: Encoder, size: int, number: int) -> Sample:
        draw = self.random(size, number)
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
        return self.sample([*encoder.begin, *context], asked, encoder.encode(answer), {"entries": size})


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

    def samples(self, tokenizer: Any, vocab_size: int) -> list[Sample]:
        """See `Task.samples`."""
        encoder = Encoder(tokenizer)
        most = (max(self.turns) - 1) * self.turn_tokens
        texts = encoder.filler(self.haystack, most, self.samples_per_place, self.cache_folder)
        return [self._sample(encoder, text, turn, i) for turn in self.turns for i, text in enumerate(texts)]

    def _sample(self, encoder: Encoder, text: list[int], turn: int, index: int) -> Turns:
        draw = self.random(turn, index)
        values = {"name": draw.choice(NAMES), "number": draw.randrange(10_000, 100_000)}
        fillers = [text[begin : begin + self.turn_tokens] for begin in range(0, len(text), self.turn_tokens)]
        fillers[0] = [*encoder.begin, *encoder.encode(self.fact.format(**values)), *fillers[0]]
        asked, start = encoder.ask(self.question_text.format(**values))
        turns = [*fillers[: turn - 1], [*asked, *start]]
        prompt = [token for each in turns for token in each]
        answer, reply = encoder.encode(f" {values['number']}"), self.params(self.reply_tokens)
        context = None if isinstance(self.haystack, str) else index
        answers = {turn - 1: answer}
        return Turns(prompt, answer, {"turn": turn}, context=context, turns=turns, answers=answers, reply=reply)
