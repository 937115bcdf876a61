"""The base class of all tasks: samples, their results from an engine, the row of both, and coordinates on a grid."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pandas
from pydantic import Field
from tqdm import tqdm

from dmc.config.settings import Count, Share
from dmc.data import DocumentSource
from dmc.files import json_digest
from dmc.results.measurement import Row
from dmc.runtime import Engine, GenerationStats


@dataclass(frozen=True)
class Sample:
    """A prompt, which the cache compresses, and its continuation."""

    prompt: list[int]
    continuation: list[int]
    coordinates: dict[str, float] = field(default_factory=dict)
    """Coordinates on the task's grid, such as {"length": 1024, "depth": 0.5}; empty: no grid."""
    after: list[int] = field(default_factory=list)
    """Tokens fed between the two, after compression: the answer's beginning, and maybe the question."""
    context: Any = None
    """Context that it shares with other samples, such as a text: those are no independent evidence. None: its own."""


@dataclass(frozen=True)
class Breakdown:
    """Metrics at one coordinate of a task's grid."""

    coordinates: dict[str, float]
    metrics: dict[str, float]


@dataclass(frozen=True)
class SampleResult:
    """Result of a model on one sample."""

    metrics: dict[str, float]
    """Metrics, with the same names for every sample of a task, whose metrics are their means."""
    stats: GenerationStats
    """Memory at the sample's last step."""
    breakdown: list[Breakdown] = field(default_factory=list)
    """Metrics by coordinate: one for a sample with coordinates, several if it covers several coordinates."""
    others: list[GenerationStats] = field(default_factory=list)
    """Memory of the sample's further sequences, such as other continuations of its prompt."""
    answer: list[int] = field(default_factory=list)
    """What a full cache has answered, for a task whose right answers that is; else empty."""


Counts = Annotated[Sequence[Count], Field(min_length=1)]
Depths = Annotated[Sequence[Share], Field(min_length=1)]
"""Positions in a text: 0 is the beginning, 1 the end."""


@dataclass(frozen=True)
class Conditions:
    """What a task is measured under, beside its engine."""

    model: str
    """Folder or hub name of the model, for tasks that make their data with its tokenizer."""
    together: int
    """Number of samples that run at the same time."""
    seed: int
    """Seed of sampled answers, for tasks that have none of their own."""
    folder: Path
    """Folder of what a task saves beside its row."""


class Task:
    """A quality measurement, during which memory is measured too: one cell of a grid gives a row by `measure`.

    A dataclass: its options are the settings in its rows. Most tasks are their samples (`samples`) and how these are
    fed and scored (`evaluate`), configured by `configs/task/*.yaml`. Tasks of lm-eval make and score their own samples,
    see `LMEvalTask`.
    """

    main_metric: ClassVar[str] = ""
    """Metric by which methods are ranked; empty: the row says which, once it is measured."""
    higher_is_better: ClassVar[bool] = True
    needs_answers: ClassVar[bool] = False
    """Whether the right answers are those of the full cache, whose cell is measured first."""

    def samples(self, tokenizer: Any, vocab_size: int) -> list[Sample]:
        """Make the samples, deterministically.

        Args:
            tokenizer: the model's, or None.
            vocab_size: size of the model's vocabulary.
        Raises:
            ValueError: a setting does not suit the model.
        """
        raise NotImplementedError

    def evaluate(self, engine: Engine, samples: Sequence[Sample]) -> list[SampleResult]:
        """Feed some of the samples, which the engine runs at the same time, and score their answers."""
        raise NotImplementedError

    def row(self, name: str) -> Row:
        """Return the fields of its rows, beside its settings, that are known before it is measured.

        Args:
            name: of the task in the grid.
        """
        return {
            "main_metric": self.main_metric,
            "higher_is_better": self.higher_is_better,
            "split": split_of_text(self),
            "question": getattr(self, "question", None),
        }

    def row_settings(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the settings in its rows.

        Args:
            given: settings from which it was made.
        """
        options = given | plain_options(self)
        options.pop("cache_folder", None)  # changes no result
        return {"task": options}

    def measure(
        self, engine: Engine, samples: Sequence[Sample], conditions: Conditions
    ) -> tuple[Row, list[GenerationStats]]:
        """Evaluate all samples.

        Returns:
            The metrics, and the memory of every sequence.
        Raises:
            ValueError, NotImplementedError: the engine or the tokenizer refuses a setting.
        """
        found: dict[int, SampleResult] = {}
        for batch in tqdm([*batches(samples, conditions.together)], "samples", leave=False, unit="batch", disable=None):
            found |= zip(batch, self.evaluate(engine, [samples[index] for index in batch]), strict=True)
        results = [found[index] for index in range(len(samples))]
        answers = [result.answer for result in results]
        if any(answers):
            samples = [replace(sample, continuation=answer) for sample, answer in zip(samples, answers, strict=True)]
        values = {name: [result.metrics[name] for result in results] for name in results[0].metrics}
        contexts = [[number] if sample.context is None else sample.context for number, sample in enumerate(samples)]
        return {
            "metrics": {name: statistics.fmean(numbers) for name, numbers in values.items()},
            "sample_values": values.pop(self.main_metric, []),
            "samples_by_metric": values,
            "contexts": contexts if any(sample.context is not None for sample in samples) else [],
            "samples": len(results),
            **({"answers": answers} if any(answers) else {}),
            "samples_key": json_digest([[sample.prompt, sample.after, sample.continuation] for sample in samples])[:16],
            **by_coordinates(results),
        }, [stats for result in results for stats in (result.stats, *result.others)]


def batches(samples: Sequence[Sample], size: int) -> Iterator[list[int]]:
    """Yield the indices of samples that are evaluated together: whole contexts, which are read once.

    A batch has at most `size` samples; a context with more is one by itself.
    """
    batch: list[int] = []
    for indices in by_prompt(samples):
        if batch and len(batch) + len(indices) > size:
            yield batch
            batch = []
        batch += indices
    if batch:
        yield batch


def by_prompt(samples: Sequence[Sample]) -> list[list[int]]:
    """Return the indices of samples with the same prompt, in the order of their first."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(tuple(sample.prompt), []).append(index)
    return [*groups.values()]


def by_coordinates(results: Sequence[SampleResult]) -> dict[str, dict[str, list[Any]]]:
    """Average metrics by coordinates.

    Returns:
        `{"by_length_and_depth": {"length": [...], "depth": [...], "samples": [[...]], "exact_match": [[...]]}}`:
        coordinates in ascending order; counts and means are lists nested in the order of the coordinates' names, None
        where there is no sample. Empty for a task without a grid.
    """
    found: dict[str, dict[str, list[Any]]] = {}
    breakdown = [part for result in results for part in result.breakdown]
    for names in dict.fromkeys(tuple(part.coordinates) for part in breakdown):
        lines = pandas.DataFrame(
            [part.coordinates | part.metrics for part in breakdown if tuple(part.coordinates) == names]
        )
        axes = {name: sorted({*lines[name].tolist()}) for name in names}
        index = pandas.MultiIndex.from_product(axes.values(), names=names)
        groups, shape = lines.groupby(index.names), [*map(len, axes.values())]
        table = axes | {"samples": groups.size().reindex(index, fill_value=0).to_numpy().reshape(shape).tolist()}
        for metric in lines.columns.drop(index.names):
            means = groups[metric].mean().reindex(index).astype(object)
            table[metric] = means.where(means.notna(), None).to_numpy().reshape(shape).tolist()
        found["by_" + "_and_".join(names)] = table
    return found


def split_of_text(task: Task) -> str | None:
    """Return the split of a task's text, or of the problems that it draws; None: it has neither, or the user's own."""
    for source in vars(task).values():
        if isinstance(source, DocumentSource) and not getattr(source, "is_local", False):
            return getattr(source, "split", None)
    return getattr(task, "split", None)


def spread(count: int, length: int) -> list[int]:
    """Return up to `count` of `length` indices, evenly from the first to the last."""
    count = min(count, length)
    return [round(place * (length - 1) / max(1, count - 1)) for place in range(count)]


def plain_options(value: Any) -> dict[str, Any]:
    """Return all options of a dataclass as JSON content, those by default too; empty for other objects.

    A source of text has a hash of its documents too.
    """
    names = [option.name for option in fields(value) if option.init] if is_dataclass(value) else []
    options: dict[str, Any] = json.loads(json.dumps({name: getattr(value, name) for name in names}, default=_plain))
    return options


def _plain(value: Any) -> dict[str, Any]:
    content = {"content": value.digest()[:16]} if isinstance(value, DocumentSource) else {}
    return {"_target_": type(value).__qualname__} | plain_options(value) | content
