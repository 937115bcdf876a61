"""Interface of a comparison's tasks: samples, their results from an engine, and their coordinates on a grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import pandas
from pydantic import Field

from dmc.config.settings import Count, Share
from dmc.data import DocumentSource
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


class Task(Protocol):
    """Interface of a quality measurement, during which memory is measured too; configured by `configs/task/*.yaml`.

    A dataclass: its options are the settings in its rows.
    """

    main_metric: str
    """Metric by which methods are ranked."""
    higher_is_better: bool
    # needs_answers: bool, optional: right answers are those of the full cache, whose cell is measured first

    def samples(self, tokenizer: Any, vocab_size: int) -> list[Sample]:
        """Make the samples, deterministically.

        Args:
            tokenizer: the model's, or None.
            vocab_size: size of the model's vocabulary.
        Raises:
            ValueError: a setting does not suit the model.
        """

    def evaluate(self, engine: Engine, samples: Sequence[Sample]) -> list[SampleResult]:
        """Evaluate some of the samples, which the engine runs at the same time."""


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
