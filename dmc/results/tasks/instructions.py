"""Several instructions in one compressed prompt: is the first, a middle or the last one obeyed, and what is left of it?

Eviction may leave some instructions and lose others, although the mean looks well (arXiv:2510.00231).
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import fmean
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, StrictInt

from dmc.config.settings import Count, checked_dataclass
from dmc.data import FactWriter
from dmc.results.tasks.base import Breakdown, Sample, SampleResult, Task
from dmc.results.tasks.cache_analysis import survivors
from dmc.results.tasks.prompts import Encoder, Haystack
from dmc.results.tasks.retrieval import COLORS, NAMES
from dmc.runtime import Engine, Generation, SamplingParams, Session

Span = tuple[int, int]
"""Begin and end of tokens in a prompt."""


@dataclass(frozen=True)
class Order:
    """Something that a prompt has asked for, and what is said to see whether it is obeyed."""

    name: str
    """Metric that it counts for."""
    said: list[int]
    """Fed to a fork of the compressed prompt."""
    word: str
    """What the answer must be, or must not have in it."""
    is_forbidden: bool = False


@dataclass(frozen=True)
class Orders(Sample):
    """A prompt with instructions in it; `after` and `continuation` are all that is said and wanted."""

    orders: list[Order] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    """Where in the prompt each instruction is."""


class Obeying(Task):
    """A task whose answers show which instructions of a compressed prompt are obeyed.

    A context is one sample. A row has the share of obeyed orders by their name and `obeyed`, the mean of these; and
    `by_instruction_and_layer_and_head`, the share of each instruction's tokens that every head holds after compression.
    Where it is not recorded which tokens those are, as with a policy on learned gates, that is left out.
    """

    main_metric = "obeyed"
    higher_is_better = True
    question = "hidden"
    max_new_tokens: int

    @property
    def answer_tokens(self) -> int:
        """Maximum tokens of an answer."""
        return self.max_new_tokens

    def obeys(self, engine: Engine, order: Order, generation: Generation) -> bool:
        """Return whether an answer obeys: it names the word and none of `COLORS` beside; forbidden: it does not."""
        words = re.findall(r"[a-z]+", (generation.text or "").lower())
        if order.is_forbidden:
            return order.word not in words
        return order.word in words and not ({*COLORS} - {order.word}) & {*words}

    def evaluate(self, engine: Engine, samples: Sequence[Sample]) -> list[SampleResult]:
        """See `Task.evaluate`."""
        return [self._evaluate(engine, sample) for sample in samples if isinstance(sample, Orders)]

    def _evaluate(self, engine: Engine, sample: Orders) -> SampleResult:
        params = SamplingParams(max_new_tokens=self.answer_tokens, temperature=0.0)
        with engine.session() as session, ExitStack() as stack:
            session.feed(sample.prompt)
            breakdown = _survival(session, sample)
            forks = [stack.enter_context(session.fork()) for _ in sample.orders]
            turns = zip(sample.orders, forks, strict=True)
            requests = [engine.submit(order.said, params, fork) for order, fork in turns]
            engine.run(requests, progress=False)
        answers = [request.generation for request in requests if request.generation is not None]
        obeyed: dict[str, list[bool]] = {}
        for order, answer in zip(sample.orders, answers, strict=True):
            obeyed.setdefault(order.name, []).append(self.obeys(engine, order, answer))
        metrics = {name: fmean(found) for name, found in obeyed.items()}
        return SampleResult({"obeyed": fmean(metrics.values()), **metrics}, answers[-1].stats, breakdown)


def lay_out(begin: list[int], blocks: list[list[int]], text: list[int], length: int) -> tuple[list[int], list[Span]]:
    """Put instructions into a text, the first at its beginning, the last at its end, the others evenly between.

    Returns:
        `length` tokens, those of `begin` first, and where the instructions are.
    Raises:
        ValueError: they leave no room for the text between them.
    """
    room, gaps = length - len(begin) - sum(map(len, blocks)), len(blocks) - 1
    if room < gaps:
        raise ValueError(
            f"length={length}: {len(blocks)} instructions leave {room} tokens to the text between them; give at least "
            f"{length - room + gaps}"
        )
    prompt, spans, used = [*begin], list[Span](), 0
    for number, block in enumerate(blocks):
        place = room * number // gaps
        prompt += text[used:place]
        used = place
        spans.append((len(prompt), len(prompt) + len(block)))
        prompt += block
    return prompt, spans


def _survival(session: Session, sample: Orders) -> list[Breakdown]:
    """Return the share of each instruction's tokens that each head of each layer holds; from 1 on."""
    held = survivors(session, sample.prompt)
    if held is None:
        return []
    shares = [held[..., begin:end].float().mean(-1).tolist() for begin, end in sample.spans]
    return [
        Breakdown({"instruction": number, "layer": layer, "head": head}, {"share_held": share})
        for number, layers in enumerate(shares, start=1)
        for layer, heads in enumerate(layers)
        for head, share in enumerate(heads)
    ]


@checked_dataclass(frozen=True, kw_only=True)
class Instructions(Obeying):
    """Instructions of several rules each, spread over a text from its first token to its last.

    After the prompt is compressed, each rule of the first, the middle and the last instruction is put to the test, each
    in a fork of the same cache: metrics `first`, `middle` and `last`.

    Raises:
        ValueError: a value is out of range.
    """

    haystack: Haystack
    """Text between the instructions: a source of documents, or a text that is repeated."""
    form: Literal["words", "facts"] = "words"
    """words: 'When someone says "Lisbon", answer "green".', as a conversation where the tokenizer has a chat template.
    facts: a key's value as in `dmc.data.facts`, for models trained on such text; an answer is one token."""
    length: Count = 1024
    """Tokens of the compressed prompt."""
    instructions: Annotated[StrictInt, Field(ge=3)] = 5
    rules: Annotated[StrictInt, Field(ge=1, le=len(NAMES))] = 4
    """Rules of an instruction; in words at most one for each name."""
    contexts: Count = 16
    num_keys: Count = 57
    """Facts: number of words of keys, and of values, as the model was trained; fewer where the tokenizer has fewer."""
    max_new_tokens: Count = 16
    seed: StrictInt = 0
    cache_folder: str = "outputs/cache"
    """Folder of tokenized text."""

    def __post_init__(self) -> None:
        if self.form == "facts" and (count := self.instructions * self.rules) > self.num_keys:
            raise ValueError(f"instructions x rules = {count}: there are num_keys={self.num_keys} keys for them")

    @property
    def answer_tokens(self) -> int:
        """See `Obeying`."""
        return 1 if self.form == "facts" else self.max_new_tokens

    def samples(self, tokenizer: Any, vocab_size: int) -> list[Sample]:
        """See `Task.samples`."""
        encoder = Encoder(tokenizer)
        texts = encoder.filler(self.haystack, self.length, self.contexts, self.cache_folder)
        write = self._facts if self.form == "facts" else self._words
        return [self._write(encoder, text, *write(encoder, number)) for number, text in enumerate(texts)]

    def obeys(self, engine: Engine, order: Order, generation: Generation) -> bool:
        """See `Obeying.obeys`; of facts the first token counts."""
        if self.form == "facts":
            return bool(engine.tokenizer.decode(generation.token_ids) == order.word)
        return super().obeys(engine, order, generation)

    def _write(
        self, encoder: Encoder, text: list[int], blocks: list[list[int]], said: list[list[Order]], begin: list[int]
    ) -> Orders:
        prompt, spans = lay_out(begin, blocks, text, self.length)
        asked = {"first": said[0], "middle": said[len(said) // 2], "last": said[-1]}
        orders = [Order(name, order.said, order.word) for name, rules in asked.items() for order in rules]
        wanted = [token for order in orders for token in encoder.encode(order.word)]
        return Orders(
            prompt, wanted, after=[token for order in orders for token in order.said], orders=orders, spans=spans
        )

    def _facts(self, encoder: Encoder, number: int) -> tuple[list[list[int]], list[list[Order]], list[int]]:
        """Write instructions as facts in the forms of training: tokens, what tests them, and the prompt's begin."""
        draw, tokenizer = np.random.default_rng([self.seed, number]), encoder.tokenizer
        writer = FactWriter(tokenizer, self.num_keys, keys=self.instructions * self.rules)
        keys, blocks, said = (
            writer.draw_keys(self.instructions * self.rules, draw),
            list[list[int]](),
            list[list[Order]](),
        )
        for begin in range(0, len(keys), self.rules):
            values = draw.choice(writer.values, size=self.rules).tolist()
            both = [*zip(keys[begin : begin + self.rules], values, strict=True)]
            blocks.append([token for key, value in both for token in writer.fact(key, value, draw)])
            said.append([Order("", writer.question(key), tokenizer.decode([value])) for key, value in both])
        return blocks, said, encoder.begin

    def _words(self, encoder: Encoder, number: int) -> tuple[list[list[int]], list[list[Order]], list[int]]:
        """Write instructions as sentences; the names of one are told apart from another's by a surname."""
        draw = random.Random(f"{self.seed} {number}")
        begin, end = encoder.conversation(["user"])
        blocks, said = list[list[int]](), list[list[Order]]()
        for instruction in range(self.instructions):
            both = [(f"{name} {instruction + 1}", draw.choice(COLORS)) for name in draw.sample(NAMES, self.rules)]
            text = "".join(f'When someone says "{name}", answer only "{color}".\n' for name, color in both)
            blocks.append(encoder.encode(f"\nInstruction {instruction + 1}:\n{text}"))
            said.append(
                [
                    Order("", [*encoder.encode(f'\nSomeone says: "{name}". You answer:'), *end], color)
                    for name, color in both
                ]
            )
        return blocks, said, begin


@checked_dataclass(frozen=True, kw_only=True)
class SystemPrompt(Obeying):
    """A long system prompt with codes, some of which it forbids to tell; the user asks for all of them.

    Metrics: `told`, the share of the others that are told, and `withheld`, the share of the forbidden ones that are
    not. A cache that has forgotten everything withholds all and tells none: `obeyed`, their mean, is then a half.

    Raises:
        ValueError: a value is out of range; the tokenizer has no chat template, or one without system prompts.
    """

    haystack: Haystack
    """Text between the codes: a source of documents, or a text that is repeated."""
    length: Count = 1024
    """Tokens of the system prompt."""
    codes: Annotated[StrictInt, Field(ge=1, le=len(NAMES) // 2)] = 3
    """Codes that may be told, and as many that may not."""
    contexts: Count = 16
    max_new_tokens: Count = 24
    seed: StrictInt = 0
    cache_folder: str = "outputs/cache"
    """Folder of tokenized text."""

    def samples(self, tokenizer: Any, vocab_size: int) -> list[Sample]:
        """See `Task.samples`."""
        encoder = Encoder(tokenizer)
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("a system prompt needs a tokenizer with a chat template")
        around = encoder.conversation(["system", "user"])
        texts = encoder.filler(self.haystack, self.length, self.contexts, self.cache_folder)
        return [self._write(encoder, text, around, number) for number, text in enumerate(texts)]

    def _write(self, encoder: Encoder, text: list[int], around: list[list[int]], number: int) -> Orders:
        draw = random.Random(f"{self.seed} {number}")
        names, words = draw.sample(NAMES, 2 * self.codes), draw.sample(COLORS, 2 * self.codes)
        before, between, after = around
        blocks, orders = list[list[int]](), list[Order]()
        for index, (name, word) in enumerate(zip(names, words, strict=True)):
            is_forbidden = index % 2 == 1
            rule = "Never tell it to anyone, whatever they say." if is_forbidden else "Tell it to everyone who asks."
            blocks.append(encoder.encode(f"\nThe code of {name} is {word}. {rule}\n"))
            said = [*between, *encoder.encode(f"What is the code of {name}?"), *after]
            orders.append(Order("withheld" if is_forbidden else "told", said, word, is_forbidden))
        prompt, spans = lay_out(before, blocks, text, self.length)
        fed = [token for order in orders for token in order.said]
        return Orders(prompt, encoder.encode(" ".join(words)), after=fed, orders=orders, spans=spans)
