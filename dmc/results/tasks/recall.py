"""Find again what stood far back among random tokens; no tokenizer is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dmc.data import RecallSequences
from dmc.data.synthetic import RecallTask
from dmc.results.tasks.asking import Question, answer_scores, answers, check_question
from dmc.results.tasks.base import Part, Sample, SampleResult, check_positive
from dmc.results.tasks.text_loss import mean_loss
from dmc.runtime import Engine, SamplingParams


@dataclass(frozen=True)
class Recall:
    """Exact match of a remembered answer, generated greedily, and its loss: see `RecallSequences`.

    The query is fed when the cache has compressed what stands before it. Of `key_value` it is compressed with the query
    in sight, which then comes again; `question="hidden"`: without. The others' query is the same for every sample.

    A row keeps the grid `by_length_and_depth`; the depth is where the answer stood, to a tenth of the prompt.

    Raises:
        ValueError: see `RecallSequences`.
    """

    task: RecallTask
    num_samples: int = 32
    sequence_length: int = 1024
    """Tokens of prompt and answer."""
    answer_length: int = 4
    vocab_size: int | None = None
    """Tokens are drawn below it; None: all that the model knows."""
    question: Question = "known"
    seed: int = 0
    main_metric = "exact_match"
    higher_is_better = True

    def __post_init__(self) -> None:
        check_positive(self, "num_samples")
        check_question(self.question)
        self._sequences(2**31 - 1 if self.vocab_size is None else self.vocab_size)

    def identity(self) -> Any:
        """See `Task.identity`: the settings say all."""

    def samples(self, tokenizer: Any, vocab_size: int) -> list[Sample]:
        """See `Task.samples`."""
        if self.vocab_size is not None and self.vocab_size > vocab_size:
            raise ValueError(f"{self.task}: vocab_size={self.vocab_size}, the model knows {vocab_size} tokens")
        samples, sequences = [], self._sequences(self.vocab_size or vocab_size)
        for index in range(len(sequences)):
            item = sequences[index]
            tokens, start = item["input_ids"].tolist(), item["answer_start"]
            depth = round(item["source_start"] / start, 1)
            place = {"length": self.sequence_length, "depth": depth}
            asked = start - (2 if self.task == "key_value" else 1)
            end = start if self.task == "key_value" and self.question == "known" else asked
            samples.append(Sample(tokens[:end], tokens[start:], place, after=tokens[asked:start]))
        return samples

    def evaluate(self, engine: Engine, samples: Sequence[Sample]) -> list[SampleResult]:
        """See `Task.evaluate`."""
        greedy = SamplingParams(max_new_tokens=self.answer_length, temperature=0.0, ignore_eos=True)
        generations = answers(engine, samples, greedy)
        results = []
        for sample, generation, logprobs in zip(samples, generations, answer_scores(engine, samples), strict=True):
            answer = sample.continuation
            metrics = {"exact_match": float(generation.token_ids == answer), "loss": mean_loss(logprobs, answer)}
            results.append(SampleResult(metrics, generation.stats, [Part(sample.place, metrics)]))
        return results

    def _sequences(self, vocab_size: int) -> RecallSequences:
        return RecallSequences(
            self.task,
            num_sequences=self.num_samples,
            sequence_length=self.sequence_length,
            vocab_size=vocab_size,
            answer_length=self.answer_length,
            seed=self.seed,
        )
