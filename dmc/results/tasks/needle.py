"""A fact hidden at a given depth of a text of a given length: needle in a haystack, and passkey."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dmc.data import DocumentSource
from dmc.results.tasks.base import Sample
from dmc.results.tasks.text_recall import NAMES, Encoder, TextRecall, check_haystack, check_wording


@dataclass(frozen=True, kw_only=True)
class Needle(TextRecall):
    """Asks for a number that stands at `depths` of texts of `lengths`; a row keeps the grid `by_length_and_depth`.

    Raises:
        ValueError: a value is out of range.
    """

    haystack: DocumentSource | str
    """A source of documents, or a text that is repeated."""
    lengths: Sequence[int] = (512, 1024)
    """Tokens of prompts, the question included."""
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Where in the text the fact stands: 0 at its beginning, 1 at its end."""
    fact: str = "\nThe magic number of {name} is {number}.\n"
    question_text: str = "\nWhat is the magic number of {name}? The magic number is"
    digits: int = 5
    """Of the number."""
    shares_context: bool = False
    """Whether one text holds the facts of all depths, each asked for by a sample of its own: several questions to one
    context."""
    cache_folder: str = "outputs/cache"
    """Where tokenised text is kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wording(self.question_text)
        if "{number}" not in self.fact:
            raise ValueError(f"fact={self.fact!r}: expected {{number}} somewhere, and {{name}} if you like")
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths={list(self.lengths)}: expected whole numbers >= 1")
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"depths={list(self.depths)}: expected numbers from 0 to 1")
        if self.digits < 1:
            raise ValueError(f"digits={self.digits}: expected a whole number >= 1")
        if self.shares_context and ("{name}" not in self.fact or len(self.depths) > len(NAMES)):
            raise ValueError(f"shares_context=true: expected {{name}} in fact, and at most {len(NAMES)} depths")

    def identity(self) -> Any:
        """See `Task.identity`."""
        return check_haystack(self.haystack)

    def samples(self, tokenizer: Any, vocab_size: int) -> list[Sample]:
        """See `Task.samples`."""
        encoder = Encoder(tokenizer, self.chat_template)
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
    ) -> Iterator[Sample]:
        """Hide one fact at each depth, and ask for each."""
        draw = self.random(length, *depths, number)
        names = draw.sample(NAMES, len(depths))
        numbers = [draw.randrange(10 ** (self.digits - 1), 10**self.digits) for _ in depths]
        facts = [
            encoder.encode(self.fact.format(name=name, number=each)) for name, each in zip(names, numbers, strict=True)
        ]
        questions = [
            encoder.ask(self.question_text.format(name=name, number=each))
            for name, each in zip(names, numbers, strict=True)
        ]
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
        for depth, each, asked in zip(depths, numbers, questions, strict=True):
            place = {"length": length, "depth": depth}
            yield self.sample(context, asked, encoder.encode(f" {each}"), place, of_context)
