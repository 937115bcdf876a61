"""What a task of a comparison is: samples, what an engine makes of them, and where on a task's grid they stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pandas

from dmc.runtime import Engine, GenerationStats


@dataclass(frozen=True)
class Sample:
    """A prompt, which the cache remembers compressed, and what follows it."""

    prompt: list[int]
    continuation: list[int]
    place: dict[str, float] = field(default_factory=dict)
    """Where it stands on the task's grid, such as {"length": 1024, "depth": 0.5}; empty: there is none."""
    after: list[int] = field(default_factory=list)
    """What is fed between the two, when the prompt has been compressed: the answer's beginning, maybe the question."""
    context: Any = None
    """What it has in common with other samples, such as its text: those are no independent evidence. None: nothing."""


@dataclass(frozen=True)
class Part:
    """Metrics that belong to one place of a task's grid."""

    place: dict[str, float]
    metrics: dict[str, float]


@dataclass(frozen=True)
class SampleResult:
    """What a model made of one sample."""

    metrics: dict[str, float]
    """The same names for every sample of a task; a task's figures are their means."""
    stats: GenerationStats
    """Memory at the sample's last step."""
    parts: list[Part] = field(default_factory=list)
    """The same by place: one for a sample that has one, several where a sample covers several."""


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


def by_coordinates(results: Sequence[SampleResult]) -> dict[str, dict[str, list[Any]]]:
    """Average metrics place by place.

    Returns:
        `{"by_length_and_depth": {"length": [...], "depth": [...], "samples": [[...]], "exact_match": [[...]]}}`: the
        places in ascending order; counts and means are nested lists in the order of the place's names, None where
        there is no sample. Empty for a task without a grid.
    """
    found: dict[str, dict[str, list[Any]]] = {}
    parts = [part for each in results for part in each.parts]
    for names in dict.fromkeys(tuple(part.place) for part in parts):
        lines = pandas.DataFrame([part.place | part.metrics for part in parts if tuple(part.place) == names])
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
    """Name the split that a task's text is from; None: it has no text, or a text of the user's own."""
    source = getattr(task, "source", None) or getattr(task, "haystack", None)
    split = None if getattr(source, "is_local", False) else getattr(source, "split", None)
    return split if isinstance(split, str) else None  # a text itself has a method of this name


def describe_text(source: Any, name: str) -> Any:
    """Return what a text is known by, for `Task.identity`.

    Raises:
        ValueError, FileNotFoundError: the setting `name` is no source of documents, or its files are not there.
    """
    if not hasattr(source, "description"):
        expected = "expected a source of documents, {_target_: dmc.data.TextSource, name: book.txt}"
        raise ValueError(f"{name}={source!r}: {expected}")
    source.check()
    return source.description()


def check_range(task: Any, name: str, least: float, most: float | None = None) -> None:
    """Raise a ValueError for a setting of a task that is no list of numbers in a range, whole ones without an end."""
    values = getattr(task, name)
    if not values or not all(least <= each <= (each if most is None else most) for each in values):
        expected = f"whole numbers >= {least}" if most is None else f"numbers from {least} to {most}"
        raise ValueError(f"{name}={list(values)}: expected {expected}")


def spread(count: int, length: int) -> list[int]:
    """Pick up to `count` of `length` places, evenly from the first to the last."""
    count = min(count, length)
    return [round(place * (length - 1) / max(1, count - 1)) for place in range(count)]
