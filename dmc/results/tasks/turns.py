"""A fact told in the first turn of a conversation and asked for in a later one, the cache kept between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dmc.data import DocumentSource
from dmc.results.tasks.asking import Question
from dmc.results.tasks.base import Part, Sample, SampleResult, check_positive
from dmc.results.tasks.text_recall import NAMES, Encoder, TextRecall, check_haystack
from dmc.runtime import Engine, Generation, Session


@dataclass(frozen=True)
class Turns(Sample):
    """A conversation; `prompt` is all that is said to the model."""

    turns: list[list[int]] = field(default_factory=list)
    """The prompt of each turn."""


@dataclass(frozen=True, kw_only=True)
class MultiTurnRecall(TextRecall):
    """Tells a number in turn 1 and asks for it in turn k, with text and the model's replies between.

    Each conversation is a session of the engine: what one turn has compressed is what the next one sees. A row keeps
    the figures `by_turn`.

    Raises:
        ValueError: a value is out of range.
    """

    haystack: DocumentSource | str
    """What is said in between: a source of documents, or a text that is repeated."""
    turns: Sequence[int] = (2, 4, 8)
    """In which the question is asked; the first is 1."""
    turn_tokens: int = 128
    """Of filler in each turn before."""
    reply_tokens: int = 8
    """Of each reply before the answer."""
    fact: str = "The door code of {name} is {number}. Remember it.\n"
    question_text: str = "\nWhat is the door code of {name}? The door code of {name} is"
    question: Question = "hidden"
    """The turns before are compressed when it comes; there is no other way to ask in a conversation."""
    cache_folder: str = "outputs/cache"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "turn_tokens", "reply_tokens")
        if self.question != "hidden":
            raise ValueError(f"question={self.question!r}: expected hidden, a conversation is compressed before it")
        if not self.turns or min(self.turns) < 2:
            raise ValueError(f"turns={list(self.turns)}: expected whole numbers >= 2, the fact is told in turn 1")

    def identity(self) -> Any:
        """See `Task.identity`."""
        return check_haystack(self.haystack)

    def samples(self, tokenizer: Any, vocab_size: int) -> list[Sample]:
        """See `Task.samples`."""
        encoder = Encoder(tokenizer, self.chat_template)
        most = (max(self.turns) - 1) * self.turn_tokens
        texts = encoder.filler(self.haystack, most, self.samples_per_place, self.cache_folder)
        return [self._sample(encoder, text, turn, i) for turn in self.turns for i, text in enumerate(texts)]

    def _sample(self, encoder: Encoder, text: list[int], turn: int, index: int) -> Turns:
        draw = self.random(turn, index)
        values = {"name": draw.choice(NAMES), "number": draw.randrange(10_000, 100_000)}
        fillers = [text[begin : begin + self.turn_tokens] for begin in range(0, len(text), self.turn_tokens)]
        fillers[0] = [*encoder.encode(self.fact.format(**values)), *fillers[0]]
        turns = encoder.converse(fillers[: turn - 1], self.question_text.format(**values))
        prompt = [token for each in turns for token in each]
        return Turns(
            prompt,
            encoder.encode(f" {values['number']}"),
            {"turn": turn},
            context=None if isinstance(self.haystack, str) else index,
            turns=turns,
        )

    def evaluate(self, engine: Engine, samples: Sequence[Sample]) -> list[SampleResult]:
        """See `Task.evaluate`; conversations take their turns together."""
        chats = [sample for sample in samples if isinstance(sample, Turns)]
        sessions = [engine.session() for _ in chats]
        answers: dict[int, Generation] = {}
        try:
            for turn in range(max(len(chat.turns) for chat in chats)):
                going = [index for index, chat in enumerate(chats) if turn < len(chat.turns)]
                for index, generation in self._take_turn(engine, chats, sessions, turn, going):
                    if turn + 1 == len(chats[index].turns):
                        answers[index] = generation
                        sessions[index].close()
        finally:
            for session in sessions:
                session.close()
        results = []
        for index, chat in enumerate(chats):
            metrics = self.grade(engine, chat, answers[index].text)
            results.append(SampleResult(metrics, answers[index].stats, [Part(chat.place, metrics)]))
        return results

    def _take_turn(
        self, engine: Engine, chats: list[Turns], sessions: list[Session], turn: int, going: list[int]
    ) -> list[tuple[int, Generation]]:
        requests = []
        for index in going:
            is_last = turn + 1 == len(chats[index].turns)
            params = self.greedy(self.max_new_tokens if is_last else self.reply_tokens)
            requests.append(engine.submit(chats[index].turns[turn], params, sessions[index]))
        engine.run(requests, progress=False)
        return [
            (index, request.generation)
            for index, request in zip(going, requests, strict=True)
            if request.generation is not None
        ]
