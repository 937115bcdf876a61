"""What a study trains, in which order, and with which commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dmc.export import is_final
from dmc.results.grid import EngineSettings

CONTROL = "control"
"""The run that every other is compared with, of the same seed."""


@dataclass(frozen=True)
class StudyConfig:
    """A study as the user writes it.

    Raises:
        ValueError: a value is missing or out of range.
    """

    bases: dict[str, list[str]]
    """Name: arguments of `scripts/train.py`. Trained one after the other, before all runs."""
    runs: dict[str, list[str]]
    """Name: arguments of `scripts/train.py`; `control` is one of them."""
    policies: list[Any]
    """Training-free methods on the controls, as `scripts/compare.py` has them; `full` among them."""
    budgets: list[Any]
    tasks: list[Any]
    arguments: list[str] = field(default_factory=list)
    """Further arguments of every training: `trainer=auto` takes a GPU, other data or stages a larger study."""
    seeds: list[int] = field(default_factory=lambda: [0])
    processes: int = 1
    """Runs that train at the same time, each with its share of the cores."""
    only: list[str] | None = None
    """Names of the runs to do now; None: all."""
    engine: EngineSettings = field(default_factory=EngineSettings)
    output: str = "outputs/study"

    def __post_init__(self) -> None:
        if CONTROL not in self.runs:
            raise ValueError(f"runs={list(self.runs)} has no {CONTROL!r}: every run is compared with it")
        if self.processes < 1 or not self.seeds:
            raise ValueError(f"processes={self.processes}, seeds={self.seeds}: expected a number >= 1 and a list")
        unknown = sorted({*(self.only or ())} - {*self.runs})
        if unknown:
            raise ValueError(f"only={unknown}: expected some of {', '.join(self.runs)}")


@dataclass(frozen=True)
class StudyRun:
    """One training of a study."""

    name: str
    seed: int | None
    """None: a base."""
    folder: Path
    arguments: tuple[str, ...]
    """Of `scripts/train.py`."""

    @property
    def label(self) -> str:
        """Name and seed."""
        return self.name if self.seed is None else f"{self.name}-s{self.seed}"

    @property
    def final(self) -> Path:
        """Exported model."""
        return self.folder / "final"

    @property
    def is_finished(self) -> bool:
        """Whether the model of the last step is exported, with all of its weights."""
        return is_final(self.final)


def plan_bases(config: StudyConfig) -> list[StudyRun]:
    """List the bases in their order."""
    folder = Path(config.output)
    return [
        _run(folder / name, name, None, [*arguments, *config.arguments]) for name, arguments in config.bases.items()
    ]


def plan_runs(config: StudyConfig) -> list[StudyRun]:
    """List the runs of all seeds, the first seed of each before the second of any."""
    folder = Path(config.output)
    return [
        _run(folder / f"{name}-s{seed}", name, seed, [*config.runs[name], *config.arguments])
        for seed in config.seeds
        for name in config.runs
        if config.only is None or name in (*config.only, CONTROL)
    ]


def _run(folder: Path, name: str, seed: int | None, arguments: Sequence[str]) -> StudyRun:
    own = [f"output_dir={folder}"] if seed is None else [f"output_dir={folder}", f"seed={seed}"]
    return StudyRun(name, seed, folder, (*arguments, *own))
