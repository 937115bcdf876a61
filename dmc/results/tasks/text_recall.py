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
from dmc.results.chat_form import ChatForm, read_chat_form
from dmc.results.tasks.asking import Question, answer_scores, answers, check_question
from dmc.results.tasks.base import Part, Sample, SampleResult, check_positive
from dmc.results.tasks.text_loss import mean_loss
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
    question: Question = "known"
    """Whether the cache is compressed with the question in sight. What stands behind its last question mark or line
    end, the same for every sample, is fed after that and gives the answer's first token."""
    seed: int = 0
    main_metric = "exact_match"
    higher_is_better = True
    stop: ClassVar[tuple[str, ...]] = ("\n",)
    """Ends an answer."""

    def __post_init__(self) -> None:
        check_positive(self, "samples_per_place", "max_new_tokens")
        check_question(self.question)

    def extract(self, text: str) -> dict[str, str | None]:
        """Find in an answer what each metric compares; None: it is not there. Default: the first number."""
        return {"exact_match": first_number(text)}

    def evaluate(self, engine: Engine, samples: Sequence[Sample]) -> list[SampleResult]:
        """See `Task.evaluate`."""
        generations = answers(engine, samples, self.greedy(self.max_new_tokens))
        results = []
        for sample, generation, logprobs in zip(samples, generations, answer_scores(engine, samples), strict=True):
            metrics = self.grade(engine, sample, generation.text) | {"loss": mean_loss(logprobs, sample.continuation)}
            results.append(SampleResult(metrics, generation.stats, [Part(sample.place, metrics)]))
        return results

    def sample(
        self,
        tokens: list[int],
        asked: tuple[list[int], list[int]],
        answer: list[int],
        place: dict[str, float],
        context: Any = None,
    ) -> Sample:
        """Put a sample together: what is compressed, and what is fed after that."""
        question, cue = asked
        if self.question == "known":
            return Sample([*tokens, *question], answer, place, after=cue, context=context)
        return Sample(tokens, answer, place, after=[*question, *cue], context=context)

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

    def ask(self, question: str) -> tuple[list[int], list[int]]:
        """Return the tokens of the end of a prompt: of the question, and of the answer's beginning."""
        start = beginning_of_answer(question)
        asked = question.removesuffix(start)
        if not self.chat_template:
            return self.encode(asked), self.encode(start)
        return self.encode(asked.rstrip()), self.encode(self.form.closing + start.lstrip())

    def converse(self, pieces: list[list[int]], question: str) -> list[list[int]]:
        """Return the turns of a conversation: pieces that are said one after the other, then the question."""
        closing, reopening = self.encode(self.form.closing), self.encode(self.form.reopening)
        asked, start = self.ask(question)
        said = [[*piece, *closing] for piece in pieces] + [[*asked, *start]]
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


def beginning_of_answer(question: str) -> str:
    """Return what stands behind the last question mark or line end."""
    return re.split(r"[?\n]", question)[-1]


def check_wording(question_text: str) -> None:
    """Raise a ValueError for a question that does not end with the beginning of any answer."""
    start = beginning_of_answer(question_text)
    if not start.strip() or "{" in start:
        raise ValueError(
            f"question_text={question_text!r}: expected the beginning of the answer behind the last question mark or "
            "line end, without names in braces: it is fed when the cache has been compressed"
        )


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
