"""Retrieval in two stages, the second of which is known only after the first: OmniKV's 2StageRetr."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dmc.results.tasks.base import Sample
from dmc.results.tasks.text_recall import Encoder, TextRecall, first_number

COLORS = (
    *("red", "green", "blue", "yellow", "orange", "purple", "pink", "brown", "black", "white", "gray", "cyan"),
    *("magenta", "indigo", "violet", "beige", "maroon", "navy", "olive", "teal", "lime", "silver", "gold"),
)


@dataclass(frozen=True, kw_only=True)
class TwoStageRetrieval(TextRecall):
    """Asks for the color that a dictionary gives for the sum of two numbers; a row keeps the figures `by_entries`.

    With a chain of thought the model first writes the sum (`sum_match`), whose entry only then is looked for.
    Differs from the authors' data: the wording, prompts that end where the answer begins, so that base models can
    answer, and exact match, the first color named, where theirs is anywhere in the answer.

    Raises:
        ValueError: a value is out of range.
    """

    entries: Sequence[int] = (40, 50, 60, 70, 80, 90, 100, 140, 180, 200)
    """Of the dictionary, the authors' sizes."""
    chain_of_thought: bool = True
    samples_per_place: int = 15
    max_new_tokens: int = 48
    stop: ClassVar[tuple[str, ...]] = ("\n\n",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.entries or min(self.entries) < 1:
            raise ValueError(f"entries={list(self.entries)}: expected whole numbers >= 1")

    def identity(self) -> Any:
        """See `Task.identity`: the settings say all."""

    def extract(self, text: str) -> dict[str, str | None]:
        """See `TextRecall.extract`: the first color named, and the first number."""
        found = re.search(rf"\b({'|'.join(COLORS)})\b", text.lower())
        color = {"exact_match": found[0] if found else None}
        return color | {"sum_match": first_number(text)} if self.chain_of_thought else color

    def samples(self, tokenizer: Any, vocab_size: int) -> list[Sample]:
        """See `Task.samples`."""
        encoder = Encoder(tokenizer, self.chat_template)
        return [
            self._sample(encoder, size, number) for size in self.entries for number in range(self.samples_per_place)
        ]

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
