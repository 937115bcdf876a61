"""What tasks that ask about text share: filler, prompts of pieces, greedy answers and their exact match."""

from __future__ import annotations

import dataclasses
import functools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from dmc.data import DocumentSource, build_packed, framing_of
from dmc.evaluation.chat_form import ChatForm, read_chat_form
from dmc.evaluation.tasks.base import Part, Sample, SampleResult, check_positive
from dmc.evaluation.tasks.text_loss import mean_loss
from dmc.runtime import Engine, SamplingParams

NAMES = ("Lisbon", "Oslo", "Nairobi", "Lima", "Hanoi", "Quito", "Dublin", "Cairo", "Vienna", "Toronto", "Seoul", "Rome")


@dataclass(frozen=True, kw_only=True)
class TextRecall:
    """Asks for something that the prompt has said: greedy generation, exact match, and the loss of the right answer.

    Raises:
        ValueError: a value is out of range.
    """

    samples_per_place: int = 4
    """For each place of the grid."""
    max_new_tokens: int = 24
    """Tokens in which the answer must stand."""
    chat_template: bool = False
    """Whether the tokenizer's chat template is written around the prompt: what stands behind the last question mark or
    line end of a question then begins the reply."""
    seed: int = 0
    main_metric = "exact_match"
    higher_is_better = True
    stop: ClassVar[tuple[str, ...]] = ("\n",)
    """Ends an answer."""

    def __post_init__(self) -> None:
        check_positive(self, "samples_per_place", "max_new_tokens")

    def extract(self, text: str) -> dict[str, str | None]:
        """Find in an answer what each metric compares; None: it is not there. Default: the first number."""
        return {"exact_match": first_number(text)}

    def evaluate(self, engine: Engine, samples: Sequence[Sample]) -> list[SampleResult]:
        """See `Task.evaluate`."""
        prompts, answers = [each.prompt for each in samples], [each.continuation for each in samples]
        generations = engine.generate(prompts, self.greedy(self.max_new_tokens), progress=False)
        results = []
        for sample, generation, logprobs in zip(samples, generations, engine.score(prompts, answers), strict=True):
            metrics = self.grade(engine, sample, generation.text) | {"loss": mean_loss(logprobs, sample.continuation)}
            results.append(SampleResult(metrics, generation.stats, [Part(sample.place, metrics)]))
        return results

    def grade(self, engine: Engine, sample: Sample, text: str | None) -> dict[str, float]:
        """Compare a generated text with a sample's answer: 1 or 0 for each metric."""
        wanted = self.extract(engine.tokenizer.decode(sample.continuation))
        found = self.extract(text or "")
        return {name: float(found[name] is not None and found[name] == wanted[name]) for name in wanted}

    def greedy(self, max_new_tokens: int) -> SamplingParams:
        """How answers are generated."""
        return SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, stop=self.stop)

    def random(self, *place: object) -> random.Random:
        """Return the source of what a sample draws."""
        return random.Random(f"{self.seed} {place}")


@dataclass(frozen=True)
class Encoder:
    """Turns pieces of a prompt into tokens, one after the other.

    Raises:
        ValueError: there is no tokenizer, or it has no chat template to use.
    """

    tokenizer: Any
    chat_template: bool = False
    form: ChatForm = field(init=False)

    def __post_init__(self) -> None:
        if self.tokenizer is None:
            raise ValueError("a task over text needs a tokenizer in the model's folder")
        form = read_chat_form(self.tokenizer) if self.chat_template else ChatForm("", "", "")
        object.__setattr__(self, "form", form)

    @functools.cached_property
    def begin(self) -> list[int]:
        """What stands before a text: special tokens, or a template's opening."""
        return self.encode(self.form.opening) if self.chat_template else list(self.tokenizer("")["input_ids"])

    def ask(self, question: str) -> list[int]:
        """Return the tokens of the end of a prompt, up to where the answer begins."""
        if not self.chat_template:
            return self.encode(question)
        start = re.split(r"[?\n]", question)[-1]
        asked = question.removesuffix(start).rstrip()
        return [*self.encode(asked), *self.encode(self.form.closing + start.lstrip())]

    def converse(self, pieces: list[list[int]], question: str) -> list[list[int]]:
        """Return the turns of a conversation: pieces that are said one after the other, then the question."""
        closing, reopening = self.encode(self.form.closing), self.encode(self.form.reopening)
        said = [[*piece, *closing] for piece in pieces] + [self.ask(question)]
        return [[*(reopening if turn else self.begin), *tokens] for turn, tokens in enumerate(said)]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a piece, without special ones."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def filler(self, haystack: DocumentSource | str, count: int, number: int, cache_folder: str) -> list[list[int]]:
        """Return `number` windows of `count` tokens: of a source, or of a text that is repeated.

        Line ends stand for the ends of documents, where a model would stop.

        Raises:
            ValueError: the source has fewer than `count` tokens.
        """
        if isinstance(haystack, str):
            once = self.encode(haystack)
            return [(once * (count // len(once) + 1))[:count]] * number
        framing = dataclasses.replace(framing_of(self.tokenizer), begin=())
        windows: Any = build_packed(haystack, self.tokenizer, count, cache_folder, framing=framing)
        line_end = self.encode("\n")[-1]
        chosen = [windows[index % len(windows)]["input_ids"] for index in range(number)]
        return [torch.where(each == framing.end, line_end, each).tolist() for each in chosen]


def check_haystack(haystack: DocumentSource | str) -> Any:
    """Return what identifies a haystack, as JSON has it.

    Raises:
        FileNotFoundError, ValueError: it is not there, or empty.
    """
    if isinstance(haystack, str):
        if not haystack.strip():
            raise ValueError("haystack is empty: give a text that is repeated, or a source of documents")
        return haystack
    haystack.check()
    return haystack.description()


def first_number(text: str) -> str | None:
    """Return the first run of digits."""
    found = re.search(r"\d+", text)
    return found[0] if found else None
