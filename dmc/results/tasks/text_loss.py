"""Loss of text after a long context, by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any

from torch import Tensor

from dmc.config.settings import Count, checked_dataclass
from dmc.data import DocumentSource, build_packed, framing_of
from dmc.results.tasks.base import Breakdown, Sample, SampleResult, Task, spread
from dmc.runtime import Engine
from dmc.runtime.request import of_given_tokens


@checked_dataclass(frozen=True)
class TextTask(Task):
    """A task over windows of text.

    Raises:
        ValueError: a value is out of range.
    """

    source: DocumentSource
    """Held-out text, such as `dmc.data.TextSource` or `dmc.data.StandardLibrarySource`."""
    num_samples: Count = 32
    """Number of windows; fewer if the text is short."""
    cache_folder: str = field(default="outputs/cache", kw_only=True)
    """Folder of tokenized text."""

    def windows(self, tokenizer: Any, length: int) -> Any:
        """Return all windows of so many tokens, a data set with `input_ids`.

        Raises:
            ValueError: there is no tokenizer.
        """
        if tokenizer is None:
            raise ValueError("a task over text needs a tokenizer in the model's folder")
        return build_packed(self.source, tokenizer, length, self.cache_folder)


@checked_dataclass(frozen=True)
class TextLoss(TextTask):
    """Mean negative log-likelihood of text that follows a long context, in nats per token, teacher-forced.

    With `repeat_ngram` there is also `long_range_repeat_loss`, the loss of scored tokens that end an n-gram last seen
    `repeat_distance` or more tokens before, see `long_range_repeats`; windows without such a token are skipped.

    A row has metrics `by_position`: `loss` of the `bucket_tokens` tokens from each position on, and `cumulative_loss`
    of all scored tokens up to their end. With a context of one token this is the loss along a whole text, as plotted
    for PG-19. Windows are spread evenly over the text.
    """

    context_tokens: Count = 768
    """Number of tokens before the scored ones, the tokenizer's initial special tokens included."""
    scored_tokens: Count = 256
    bucket_tokens: Count = 64
    """Number of consecutive tokens whose loss is averaged, by position."""
    repeat_ngram: Count | None = None
    """Length of the n-grams; None: no `long_range_repeat_loss`."""
    repeat_distance: Count = 64
    main_metric = "loss"
    higher_is_better = False

    def samples(self, tokenizer: Any, vocab_size: int) -> list[Sample]:
        """See `Task.samples`."""
        begin = list(framing_of(tokenizer).begin) if tokenizer is not None else []
        context = self.context_tokens - len(begin)
        if context < 0:
            raise ValueError(f"context_tokens={self.context_tokens}: give at least the {len(begin)} special tokens")
        windows = self.windows(tokenizer, context + self.scored_tokens)
        samples = []
        for index in spread(self.num_samples, len(windows)):
            tokens = windows[index]["input_ids"].tolist()
            start = len(begin) if tokens[: len(begin)] == begin else 0  # at a document's start they are there
            document = windows.document_of(index, context)
            samples.append(Sample(begin + tokens[start:context], tokens[context:], context=document))
        if self.repeat_ngram is not None:
            samples = [sample for sample in samples if self._long_range_repeats(sample)]
            if not samples:
                raise ValueError(
                    f"no window repeats {self.repeat_ngram} tokens from {self.repeat_distance} tokens back"
                )
        return samples

    def evaluate(self, engine: Engine, samples: Sequence[Sample]) -> list[SampleResult]:
        """See `Task.evaluate`."""
        prompts, continuations = [sample.prompt for sample in samples], [sample.continuation for sample in samples]
        results = []
        for scoring, sample in zip(
            engine.score_with_stats(prompts, continuations, of_given_tokens), samples, strict=True
        ):
            losses = -scoring.logprobs.double()
            breakdown = self._by_position(losses, len(sample.prompt))
            metrics = {"loss": float(losses.mean())}
            if self.repeat_ngram is not None:
                metrics["long_range_repeat_loss"] = float(losses[self._long_range_repeats(sample)].mean())
            results.append(SampleResult(metrics, scoring.stats, breakdown))
        return results

    def _long_range_repeats(self, sample: Sample) -> list[int]:
        """Return the indices in the continuation of tokens that end a long-range repeat."""
        assert self.repeat_ngram is not None
        found = long_range_repeats(sample.prompt + sample.continuation, self.repeat_ngram, self.repeat_distance)
        return [position - len(sample.prompt) for position in found if position >= len(sample.prompt)]

    def _by_position(self, losses: Tensor, first: int) -> list[Breakdown]:
        """Average the losses of the tokens from position `first` on in buckets."""
        breakdown = []
        for begin in range(0, len(losses), self.bucket_tokens):
            end = begin + self.bucket_tokens
            figures = {"loss": float(losses[begin:end].mean()), "cumulative_loss": float(losses[:end].mean())}
            breakdown.append(Breakdown({"position": first + begin}, figures))
        return breakdown


def long_range_repeats(tokens: Sequence[int], ngram: int, distance: int) -> list[int]:
    """Find the tokens that end an n-gram whose last earlier occurrence is far back, for which memory matters.

    Args:
        tokens: tokens of a text.
        ngram: length of the repeated n-gram, >= 1, of which the found token is the last.
        distance: minimum number of tokens from the end of the earlier occurrence to the found token.
    Returns:
        Their positions, ascending.
    """
    last: dict[tuple[int, ...], int] = {}
    found = []
    for end in range(ngram - 1, len(tokens)):
        words = tuple(tokens[end - ngram + 1 : end + 1])
        if words in last and end - last[words] >= distance:
            found.append(end)
        last[words] = end
    return found
