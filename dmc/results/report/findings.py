"""What folders of results hold, in the one form that verdict, plots and tables read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dmc.results.benchmark import Measurement


@dataclass(frozen=True)
class Result:
    """Quality, memory and speed of one method at one budget on one task."""

    name: str
    """Of the method, short: what labels show."""
    method: str
    """With its model."""
    model: str
    budget: str
    """As asked for: CR 4, 128 tokens, full cache."""
    own_gates: bool
    """Whether the model's own gates compress."""
    is_full: bool
    """Whether it is the full cache of a stock model, the yardstick."""
    task: str
    metric: str
    higher_is_better: bool
    quality: float
    quality_error: float | None
    """Standard error; None where one sample, or the writer, gives none."""
    over_full_cache: float | None
    over_full_cache_error: float | None
    """Standard error of the difference."""
    requested_ratio: float
    achieved_ratio: float
    """Over all positions that were predicted: tokens over entries, both in sum."""
    bytes_per_token: float
    """Allocated, over the same positions: whole pages, tables and all other state."""
    bytes_allocated: int | None
    """The most at any of them."""
    prefill_tokens_per_second: float | None
    decode_tokens_per_second: float | None
    samples: int | None
    source: int
    """Place in `Findings.sources`."""
    samples_key: str | None = None
    """The same where the samples are."""
    sample_values: list[float] = field(default_factory=list)
    task_values: list[list[float]] = field(default_factory=list)
    """The same task by task, of a benchmark of several."""

    @property
    def groups(self) -> list[list[float]]:
        """Values of samples, task by task."""
        return self.task_values or [self.sample_values]

    @property
    def title(self) -> str:
        """Method and budget."""
        return self.name if self.is_full else f"{self.name} at {self.budget}"


@dataclass(frozen=True)
class Speed:
    """One contestant of a benchmark at one batch size."""

    measurement: Measurement
    source: int


@dataclass(frozen=True)
class LargestBatch:
    """How many sequences decode at the same time in a given memory."""

    ratio: float
    memory: int
    batch_size: int
    source: int


@dataclass(frozen=True)
class Failure:
    """A cell without a figure, and why."""

    method: str
    budget: str
    task: str
    error: str
    source: int


@dataclass(frozen=True)
class Heatmap:
    """Numbers over two axes, of one method at one budget; None where there is none."""

    name: str
    """Of the method."""
    method: str
    """With its model."""
    title: str
    task: str
    values: list[list[float | None]]
    """Row by row, the first at the top."""
    rows: list[str]
    columns: list[str]


@dataclass(frozen=True)
class Curve:
    """A metric of one method at one budget over the places of a task: positions, turns."""

    title: str
    method: str
    own_gates: bool
    is_full: bool
    task: str
    axis: str
    metric: str
    places: list[float]
    values: list[float | None]


@dataclass(frozen=True)
class Profile:
    """A figure of all layers, and of each, over the places of a text or the steps of a training run."""

    axis: str
    measure: str
    places: list[float]
    of_all: list[float]
    of_layers: list[list[float]]
    """Layer by layer."""


@dataclass(frozen=True)
class Segments:
    """How many segments have each length."""

    lengths: list[int]
    """In tokens, ascending."""
    counts: list[int]

    @property
    def mean(self) -> float:
        """Tokens of a segment on average."""
        tokens = sum(length * count for length, count in zip(self.lengths, self.counts, strict=True))
        return tokens / max(1, sum(self.counts))


@dataclass(frozen=True)
class Inside:
    """What the gates of a model merge, or what a policy leaves of its cache."""

    name: str
    """Of model, policy and budget, or of a training run."""
    text: str
    """How much was read; empty for a training run."""
    ratios: list[list[float]]
    """CR, layer x KV head."""
    profiles: list[Profile]
    segments: Segments | None
    source: int

    @property
    def ratio(self) -> float:
        """CR of all heads together."""
        ratios = [ratio for layer in self.ratios for ratio in layer]
        return len(ratios) / sum(1 / ratio for ratio in ratios)


@dataclass(frozen=True)
class Source:
    """The command and the environment that rows come from."""

    folder: str
    command: str
    git_commit: str | None
    machine: str
    versions: dict[str, str]


@dataclass
class Findings:
    """Everything that a report shows."""

    results: list[Result] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    largest_batches: list[LargestBatch] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    needles: list[Heatmap] = field(default_factory=list)
    head_ratios: list[Heatmap] = field(default_factory=list)
    """CR, layer x KV head."""
    curves: list[Curve] = field(default_factory=list)
    insides: list[Inside] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was left out, and why."""
    sources: list[Source] = field(default_factory=list)

    def add_source(self, folder: str, provenance: dict[str, Any], device: str = "") -> int:
        """Return the place of a source, a new one where it is new."""
        machine = ", ".join(filter(None, (device, provenance.get("machine"))))
        versions = dict(provenance.get("versions") or {})
        command = provenance.get("command") or "unknown"
        source = Source(folder, command, provenance.get("git_commit"), machine, versions)
        if source not in self.sources:
            self.sources.append(source)
        return self.sources.index(source)

    @property
    def tasks(self) -> dict[str, list[Result]]:
        """Results by task."""
        found: dict[str, list[Result]] = {}
        for result in self.results:
            found.setdefault(result.task, []).append(result)
        return found
