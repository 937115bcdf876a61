"""What a compressed cache is asked to do: predict text, or find again what stood far back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from dmc.data import DocumentSource, RecallSequences, build_packed
from dmc.data.synthetic import RecallTask
from dmc.runtime import Engine, GenerationStats, SamplingParams


@dataclass(frozen=True)
class Sample:
    """A prompt, which the cache remembers compressed, and what follows it."""

    prompt: list[int]
    continuation: list[int]


@dataclass(frozen=True)
class SampleResult:
    """What a model made of one sample."""

    metrics: dict[str, float]
    """The same names for every sample of a task; a task's figures are their means."""
    stats: GenerationStats
    """Memory at the sample's last step."""


class Task(Protocol):
    """A measure of quality; the cache's memory is measured with it. Named and set up by `configs/task/*.yaml`."""

    main_metric: str
    """The one by which methods are ranked."""
    higher_is_better: bool

    def identity(self) -> Any:
        """Return what the samples depend on beside the settings (the files of a corpus), as JSON has it.

        Raises:
            FileNotFoundError, ValueError: something that the samples are made of is not there.
        """

    def samples(self, tokenizer: Any, vocab_size: int) -> list[Sample]:
        """Make the samples: always the same.

        Args:
            tokenizer: the model's, or None.
            vocab_size: tokens that the model knows.
        Raises:
            ValueError: a setting does not suit the model.
        """

    def evaluate(self, engine: Engine, samples: Sequence[Sample]) -> list[SampleResult]:
        """Run some of the samples, which the engine takes at the same time."""


@dataclass(frozen=True)
class TextLoss:
    """Mean negative log-likelihood of text that follows a long context, in nats per token, teacher-forced.

    Raises:
        ValueError: a value is out of range.
    """

    source: DocumentSource
    """Held-out text, such as `dmc.data.TextSource` or `dmc.data.StandardLibrarySource`."""
    num_samples: int = 32
    """Windows, spread evenly over the text; fewer if the text is short."""
    context_tokens: int = 768
    """What precedes the scored tokens, the tokens with which the tokenizer begins a text included."""
    scored_tokens: int = 256
    cache_folder: str = "outputs/cache"
    """Where tokenised text is kept."""
    main_metric = "loss"
    higher_is_better = False

    def __post_init__(self) -> None:
        for name in ("num_samples", "context_tokens", "scored_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected a whole number >= 1")

    def identity(self) -> Any:
        """See `Task.identity`."""
        self.source.check()
        return self.source.description()

    def samples(self, tokenizer: Any, vocab_size: int) -> list[Sample]:
        """See `Task.samples`."""
        if tokenizer is None:
            raise ValueError("text_loss needs a tokenizer in the model's folder")
        begin = list(tokenizer("")["input_ids"])
        context = self.context_tokens - len(begin)
        if context < 0:
            raise ValueError(f"context_tokens={self.context_tokens}: a text begins with {len(begin)} special tokens")
        windows: Any = build_packed(self.source, tokenizer, context + self.scored_tokens, self.cache_folder)
        samples = []
        for index in _spread(self.num_samples, len(windows)):
            tokens = windows[index]["input_ids"].tolist()
            samples.append(Sample(begin + tokens[:context], tokens[context:]))
        return samples

    def evaluate(self, engine: Engine, samples: Sequence[Sample]) -> list[SampleResult]:
        """See `Task.evaluate`."""
        prompts, continuations = [each.prompt for each in samples], [each.continuation for each in samples]
        scorings = engine.score_with_stats(prompts, continuations)
        return [
            SampleResult({"loss": mean_loss(scoring.logprobs, continuation)}, scoring.stats)
            for scoring, continuation in zip(scorings, continuations, strict=True)
        ]


@dataclass(frozen=True)
class Recall:
    """Exact match of a remembered answer, generated greedily, and its loss: see `RecallSequences`.

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
    seed: int = 0
    main_metric = "exact_match"
    higher_is_better = True

    def __post_init__(self) -> None:
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
            samples.append(Sample(tokens[:start], tokens[start:]))
        return samples

    def evaluate(self, engine: Engine, samples: Sequence[Sample]) -> list[SampleResult]:
        """See `Task.evaluate`."""
        prompts, answers = [each.prompt for each in samples], [each.continuation for each in samples]
        greedy = SamplingParams(max_new_tokens=self.answer_length, temperature=0.0, ignore_eos=True)
        generations = engine.generate(prompts, greedy, progress=False)
        results = []
        for generation, logprobs, answer in zip(generations, engine.score(prompts, answers), answers, strict=True):
            metrics = {"exact_match": float(generation.token_ids == answer), "loss": mean_loss(logprobs, answer)}
            results.append(SampleResult(metrics, generation.stats))
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


def mean_loss(logprobs: Tensor, tokens: list[int]) -> float:
    """Mean negative log-probability of `tokens` in nats; logprobs [len(tokens), vocab]."""
    chosen = logprobs.gather(-1, logprobs.new_tensor(tokens).long()[:, None])
    return -float(chosen.double().mean())


def _spread(count: int, length: int) -> list[int]:
    """Pick up to `count` of `length` places, evenly from the first to the last."""
    count = min(count, length)
    return [round(place * (length - 1) / max(1, count - 1)) for place in range(count)]
