"""Tasks that ask for something far back: the cache compresses a prompt, then is fed the rest, and answers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dmc.bounds import Count, check_fields
from dmc.data import RecallSequences
from dmc.data.synthetic import RecallTask
from dmc.results.tasks.base import Part, Sample, SampleResult
from dmc.runtime import Engine, Generation, SamplingParams
from dmc.runtime.forced import of_given_tokens
from dmc.runtime.generation import Scoring

Question = Literal["known", "hidden"]
"""Whether the cache is compressed with the question in the prompt, or with the context alone."""


class Asking:
    """A task with greedy answers, no token of which is predicted by the prompt's own pass."""

    main_metric = "exact_match"
    higher_is_better = True
    question: Question

    def params(self) -> SamplingParams:
        """Return the sampling parameters of answers."""
        raise NotImplementedError

    def grade(self, engine: Engine, sample: Sample, generation: Generation) -> dict[str, float]:
        """Compare a generated answer with a sample's: 1 or 0 for each metric."""
        raise NotImplementedError

    def check_question(self) -> None:
        """Raise a ValueError unless `question` is a `Question`."""
        if self.question not in get_args(Question):
            raise ValueError(
                f"question={self.question!r}: expected known (the cache is compressed with the question in sight) or "
                "hidden (before it comes); its wording is question_text"
            )

    def evaluate(self, engine: Engine, samples: Sequence[Sample]) -> list[SampleResult]:
        """See `Task.evaluate`; `loss` is the right answer's. A prompt shared by several samples is compressed once."""
        groups = [list(group) for _, group in itertools.groupby(samples, lambda sample: sample.prompt)]
        if len(groups) < len(samples):
            return [result for group in groups for result in self._ask_forks(engine, group)]
        prompts, after = [each.prompt for each in samples], [each.after for each in samples]
        generations = engine.generate(prompts, self.params(), progress=False, after=after)
        right = [each.continuation for each in samples]
        scorings = engine.score_with_stats(prompts, right, of_given_tokens, after)
        return self._results(engine, samples, generations, scorings)

    def _ask_forks(self, engine: Engine, samples: Sequence[Sample]) -> list[SampleResult]:
        """Answer samples that share a prompt, each from a fork of the same cache."""
        after, right = [each.after for each in samples], [each.continuation for each in samples]
        with engine.session() as session:
            session.feed(samples[0].prompt)
            with ExitStack() as stack:
                forks = [stack.enter_context(session.fork()) for _ in samples]
                turns = zip(after, forks, strict=True)
                requests = [engine.submit(each, self.params(), fork) for each, fork in turns]
                engine.run(requests, progress=False)
            with ExitStack() as stack:
                forks = [stack.enter_context(session.fork()) for _ in samples]
                scorings = engine.score_with_stats(forks, right, of_given_tokens, after)
        generations = [request.generation for request in requests if request.generation is not None]
        return self._results(engine, samples, generations, scorings)

    def _results(
        self, engine: Engine, samples: Sequence[Sample], generations: list[Generation], scorings: list[Scoring]
    ) -> list[SampleResult]:
        results = []
        for sample, generation, scoring in zip(samples, generations, scorings, strict=True):
            metrics = self.grade(engine, sample, generation) | {"loss": -float(scoring.logprobs.double().mean())}
            results.append(SampleResult(metrics, generation.stats, [Part(sample.place, metrics)]))
        return results


@dataclass(frozen=True)
class Recall(Asking):
    """Asks to repeat tokens from far back among random tokens, see `RecallSequences`; no tokenizer is needed.

    The query is fed after the cache has compressed the tokens before it. For `key_value` the query is also part of the
    compressed prompt, unless `question="hidden"`. The query of the other tasks is the same for every sample.

    A row has the grid `by_length_and_depth`; the depth is the position of the answer, to a tenth of the prompt.

    Raises:
        ValueError: see `RecallSequences`.
    """

    task: RecallTask
    num_samples: Count = 32
    sequence_length: int = 1024
    """Number of tokens of prompt and answer."""
    answer_length: int = 4
    vocab_size: int | None = None
    """Tokens are drawn below it; None: from the model's whole vocabulary."""
    question: Question = "known"
    seed: int = 0

    def __post_init__(self) -> None:
        self.check_question()
        check_fields(self)
        self._sequences(2**31 - 1 if self.vocab_size is None else self.vocab_size)

    def identity(self) -> Any:
        """See `Task.identity`: only the settings matter."""

    def params(self) -> SamplingParams:
        """See `Asking.params`."""
        return SamplingParams(max_new_tokens=self.answer_length, temperature=0.0, ignore_eos=True)

    def grade(self, engine: Engine, sample: Sample, generation: Generation) -> dict[str, float]:
        """See `Asking.grade`: every token must be right."""
        return {"exact_match": float(generation.token_ids == sample.continuation)}

    def samples(self, tokenizer: Any, vocab_size: int) -> list[Sample]:
        """See `Task.samples`."""
        if self.vocab_size is not None and self.vocab_size > vocab_size:
            raise ValueError(f"{self.task}: vocab_size={self.vocab_size}, the model knows {vocab_size} tokens")
        samples, sequences = [], self._sequences(self.vocab_size or vocab_size)
        for index in range(self.num_samples):
            tokens, start, source = sequences[index]
            place = {"length": self.sequence_length, "depth": round(source / start, 1)}
            asked = start - (2 if self.task == "key_value" else 1)
            end = start if self.task == "key_value" and self.question == "known" else asked
            samples.append(Sample(tokens[:end], tokens[start:], place, after=tokens[asked:start]))
        return samples

    def _sequences(self, vocab_size: int) -> RecallSequences:
        return RecallSequences(self.task, self.sequence_length, vocab_size, self.answer_length, self.seed)
