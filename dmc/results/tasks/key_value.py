"""The value of one of many keys, as in Liu et al., *Lost in the Middle* (arXiv:2307.03172)."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dmc.results.tasks.base import Sample
from dmc.results.tasks.text_recall import Encoder, TextRecall

TASK = "The JSON object below maps keys to values. Answer with the value of the key that is asked for.\n\n{"
QUESTION = '}}\n\nKey: "{key}"\nValue: "'


@dataclass(frozen=True, kw_only=True)
class KeyValuePairs(TextRecall):
    """Asks for the value of one key of a JSON object of UUIDs; a row keeps the grid `by_length_and_depth`.

    Raises:
        ValueError: a value is out of range.
    """

    lengths: Sequence[int] = (1024, 2048)
    """Tokens that prompts have at most: as many pairs as fit."""
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Which pair is asked for: 0 the first, 1 the last."""
    max_new_tokens: int = 64
    stop: ClassVar[tuple[str, ...]] = ('"', "\n")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths={list(self.lengths)}: expected whole numbers >= 1")
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"depths={list(self.depths)}: expected numbers from 0 to 1")

    def identity(self) -> Any:
        """See `Task.identity`: the settings say all."""

    def extract(self, text: str) -> dict[str, str | None]:
        """See `TextRecall.extract`: what stands before the closing quote."""
        return {"exact_match": text.split('"')[0].strip() or None}

    def samples(self, tokenizer: Any, vocab_size: int) -> list[Sample]:
        """See `Task.samples`."""
        encoder = Encoder(tokenizer, self.chat_template)
        return [
            self._sample(encoder, length, depth, number)
            for length in self.lengths
            for depth in self.depths
            for number in range(self.samples_per_place)
        ]

    def _sample(self, encoder: Encoder, length: int, depth: float, number: int) -> Sample:
        draw = self.random(length, number)  # the same pairs at every depth
        pairs: list[tuple[str, str]] = []
        tokens: list[list[int]] = []
        room, longest = length - len(encoder.begin) - len(encoder.encode(TASK)), 0
        while True:
            key, value = [str(uuid.UUID(int=draw.getrandbits(128), version=4)) for _ in range(2)]
            piece = encoder.encode(f'"{key}": "{value}",\n')
            longest = max(longest, sum(map(len, encoder.ask(QUESTION.format(key=key)))))  # any key may be asked for
            room -= len(piece)
            if room < longest:
                break
            pairs.append((key, value))
            tokens.append(piece)
        if not pairs:
            raise ValueError(f"lengths: {length} tokens have no room for a single pair of UUIDs")
        key, value = pairs[round(depth * (len(pairs) - 1))]
        body = [token for piece in tokens for token in piece]
        context = [*encoder.begin, *encoder.encode(TASK), *body]
        asked, answer = encoder.ask(QUESTION.format(key=key)), encoder.encode(f'{value}"')
        return self.sample(context, asked, answer, {"length": length, "depth": depth}, (length, number))
