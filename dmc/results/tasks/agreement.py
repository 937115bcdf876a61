"""Agreement with the full cache: how much of its answers a compressed cache would give too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from dmc.config.settings import Count, checked_dataclass
from dmc.results.tasks.base import Sample, SampleResult, Task
from dmc.results.tasks.forking import answers_of, scores_of
from dmc.results.tasks.prompts import Encoder, Haystack
from dmc.runtime import Engine, SamplingParams


@checked_dataclass(frozen=True, kw_only=True)
class Agreement(Task):
    """Compares greedy answers to questions about a text with those that the full cache gives.

    The full cache's cell is measured first, and its row keeps its answers. They are fed to each other method, token by
    token: `agreement` is the share of tokens that the method would choose as well, `identical` the share before the
    first that it would not, which is what greedy decoding has in common, and `loss` that of the answers in nats per
    token. Texts are messages in the tokenizer's chat template, if it has one; they are compressed before the question.

    Raises:
        ValueError: a value is out of range.
    """

    main_metric: ClassVar[str] = "agreement"
    higher_is_better: ClassVar[bool] = True
    question: ClassVar[str] = "hidden"
    needs_answers: ClassVar[bool] = True
    """Whether samples of all but the full cache's cell have its answers as continuations."""

    haystack: Haystack
    """A source of documents, or a text that is repeated."""
    length: Count = 1024
    """Tokens of a text with the template's before it."""
    contexts: Count = 50
    questions: Annotated[Sequence[str], Field(min_length=1)] = (
        "Summarize the text above.",
        "What is the text above about?",
        "List the most important points of the text above.",
        "Explain the text above to a beginner.",
    )
    """Questions about each text."""
    answer_tokens: Count = 128
    """Maximum tokens of an answer."""
    cache_folder: str = "outputs/cache"
    """Folder of tokenized text."""

    def samples(self, tokenizer: Any, vocab_size: int) -> list[Sample]:
        """See `Task.samples`; the right answers are not known yet."""
        encoder = Encoder(tokenizer)
        begin, end = encoder.conversation(["user"])
        if (room := self.length - len(begin)) < 1:
            raise ValueError(f"length={self.length}: give more than the {len(begin)} tokens of the chat template")
        texts = encoder.filler(self.haystack, room, self.contexts, self.cache_folder)
        return [
            Sample([*begin, *text], [], after=[*encoder.encode(f"\n\n{question}"), *end], context=texts.index(text))
            for text in texts
            for question in self.questions
        ]

    def evaluate(self, engine: Engine, samples: Sequence[Sample]) -> list[SampleResult]:
        """See `Task.evaluate`; samples without a right answer are answered."""
        if not samples[0].continuation:
            params = SamplingParams(max_new_tokens=self.answer_tokens, temperature=0.0)
            generations = [generation for generation, _ in answers_of(engine, samples, params)]
            return [
                SampleResult(
                    _metrics(torch.tensor(generation.logprobs), torch.ones(len(generation.logprobs))),
                    generation.stats,
                    answer=generation.token_ids,
                )
                for generation in generations
            ]
        return [
            SampleResult(_metrics(*scoring.logprobs.unbind(-1)), scoring.stats)
            for scoring in scores_of(engine, samples, with_choice)
        ]


def with_choice(logprobs: Tensor, tokens: Tensor) -> Tensor:
    """Keep the log-probability of each true token, and whether it is the likeliest, float32 [n, 2]."""
    given = logprobs.gather(-1, tokens[:, None])
    return torch.cat((given, (logprobs.argmax(-1, keepdim=True) == tokens[:, None]).float()), dim=-1)


def _metrics(logprobs: Tensor, is_chosen: Tensor) -> dict[str, float]:
    return {
        "agreement": float(is_chosen.mean()),
        "identical": float(is_chosen.cumprod(0).mean()),
        "loss": -float(logprobs.double().mean()),
    }
