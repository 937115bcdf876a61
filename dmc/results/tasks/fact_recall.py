"""Recall of facts in a text: many questions about one context, which is compressed before all of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, StrictInt
from typing_extensions import override

from dmc.config.settings import Count, Share, checked_dataclass
from dmc.data import FactWriter
from dmc.data.config import Words
from dmc.data.facts import Key, half, weave
from dmc.results.tasks.asking import Asking, Turns
from dmc.results.tasks.base import Counts, Sample
from dmc.results.tasks.prompts import Encoder, Haystack
from dmc.runtime import SamplingParams


@checked_dataclass(frozen=True, kw_only=True)
class FactRecall(Asking):
    """Asks for the values that facts in a text assign to keys, see `dmc.data.facts`: answers of one token.

    Contexts are windows spread over the text, repeated if there are too few; each has its own facts, so intervals are
    over other facts in the same text. Facts are spread evenly. Each hidden question continues from a fork of the same
    compressed cache. Known questions are compressed together with the context, then fed again. Questions in turn are
    hidden and follow each other in one conversation, in random order, the model's own answers between them.

    A row has the grid `by_length_and_depth`; the depth is the position of the value, to a tenth of the context. In turn
    a context is one sample, and a row has metrics `by_turn`; turn 1 is the context.

    Raises:
        ValueError: a value is out of range.
    """

    haystack: Haystack
    """Text between the facts: a source of documents, or a text that is repeated."""
    lengths: Counts = (1024,)
    """Tokens of contexts with a question."""
    keys: Count = 40
    """Number of keys with a value in a context."""
    num_keys: Count = 57
    """Number of words of keys in all, and of values, as the model was trained; fewer where the tokenizer has fewer."""
    key_words: Annotated[StrictInt, Field(ge=1, le=4)] = 1
    """Number of words of a key."""
    words: Words = "all"
    """Keys and values to use: if gates were trained on one half, the other tests whether they generalize to unseen
    words."""
    form: Literal["seen", "unseen"] = "unseen"
    """Whether facts have forms that occur in training."""
    rebinding: Share = 0.0
    """Share of keys that were assigned another value before."""
    contexts: Count = 16
    """Number of contexts of each length."""
    questions: Count = 8
    """Number of questions about each context, on keys drawn from it."""
    question: Literal["known", "hidden", "in_turn"] = "hidden"
    seed: StrictInt = 0
    cache_folder: str = "outputs/cache"
    """Folder of tokenized text."""

    def __post_init__(self) -> None:
        there = len(range(self.num_keys)[half(self.num_keys, self.words)])
        if self.keys > (most := there**self.key_words):
            words = f"num_keys={self.num_keys}, words={self.words}, key_words={self.key_words}"
            raise ValueError(f"keys={self.keys}: expected at most {most} ({words})")
        if self.questions > self.keys:
            raise ValueError(f"questions={self.questions}: expected at most the keys={self.keys} of a context")

    @override
    def params(self) -> SamplingParams:
        return SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)

    def samples(self, tokenizer: Any, vocab_size: int) -> list[Sample]:
        """See `Task.samples`."""
        encoder = Encoder(tokenizer)
        writer = FactWriter(tokenizer, self.num_keys, self.words, self.key_words, keys=self.keys)
        texts = encoder.filler(self.haystack, max(self.lengths), self.contexts, self.cache_folder)
        return [
            sample
            for length in self.lengths
            for number, text in enumerate(texts)
            for sample in self._ask(encoder.begin, writer, text, length, number)
        ]

    def _ask(self, begin: list[int], writer: FactWriter, text: list[int], length: int, number: int) -> list[Sample]:
        draw = np.random.default_rng([self.seed, length, number])
        keys = writer.draw_keys(self.keys, draw)
        said: list[tuple[float, Key, int, bool]] = []
        for key in keys:
            times = np.sort(draw.random(1 + (draw.random() < self.rebinding))).tolist()
            values = draw.choice(writer.values, size=len(times)).tolist()
            said += [(time, key, value, time == times[-1]) for time, value in zip(times, values, strict=True)]
        said.sort()
        inserts = [writer.fact(key, value, draw, unseen=self.form == "unseen") for _, key, value, _ in said]
        try:
            tokens, begins = weave(inserts, text, length - len(begin) - len(writer.question(keys[0])), draw)
        except ValueError as error:
            raise ValueError(f"lengths: {length} tokens have no room for keys={self.keys}: {error}") from error
        context, samples = [*begin, *tokens], []
        asked = {keys[index] for index in draw.choice(self.keys, size=self.questions, replace=False)}
        for start, insert, (_, key, value, is_newest) in zip(begins, inserts, said, strict=True):
            if key not in asked or not is_newest:
                continue
            coordinates = {"length": length, "depth": round((start + insert.index(value)) / len(tokens), 1)}
            question = writer.question(key)
            prompt = [*context, *question] if self.question == "known" else context
            samples.append(Sample(prompt, [value], coordinates, after=question, context=number))
        if self.question != "in_turn":
            return samples
        asked_in_turn = [samples[index] for index in draw.permutation(len(samples))]
        turns = [context, *(sample.after for sample in asked_in_turn)]
        answers = {turn: sample.continuation for turn, sample in enumerate(asked_in_turn, 1)}
        conversation = [token for turn in turns for token in turn]
        return [Turns(conversation, asked_in_turn[-1].continuation, context=number, turns=turns, answers=answers)]
