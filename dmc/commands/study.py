"""A reproducible study: bases, retrofits and controls over seeds, all methods at equal bytes, one table.

Trainings run in processes of their own; what they cost is one grid of `dmc.results.compare`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt
from tqdm import tqdm

from dmc.config import build_config
from dmc.config.folder import CONFIGS
from dmc.config.processor import available_cores
from dmc.config.settings import Count, Named, OutputFolder, checked_dataclass, suggest
from dmc.models.loading import load_with_tokenizer
from dmc.results.compare import compare
from dmc.results.equal_bytes import bytes_budget, share_of
from dmc.results.grid import CompareConfig, EngineSettings, named_settings, plan_methods, plan_tasks
from dmc.results.measurement import FULL

CONTROL = "control"
"""Name of the run that every other run of the same seed is compared with."""
METRICS = ("loss", "long_range_repeat_loss", "exact_match")
"""Loss of all tokens, loss of long-range repeats, and share of right answers."""


@checked_dataclass(frozen=True)
class StudyConfig:
    """Settings of a study.

    Raises:
        ValueError: a value is missing or out of range.
    """

    bases: Named[list[str]]
    """Arguments of `dmc train` by name; bases are trained one after the other, before all runs."""
    runs: Named[list[str]]
    """Arguments of `dmc train` by name; `control` is one of them."""
    policies: list[Any]
    """Training-free methods on the controls, as `dmc compare` has them; `full` among them."""
    budgets: list[Any]
    """Budgets of the policies; a budget in a run's bytes, `bytes:best_cr4`, waits for that run."""
    tasks: list[Any]
    further: Named[list[str]] = field(default_factory=dict)
    """Policies, of those above, that compress the prompts of runs further, by name of the run."""
    arguments: list[str] = field(default_factory=list)
    """Further arguments of every training: `trainer=auto` takes a GPU, other data or stages a larger study."""
    seeds: Annotated[list[StrictInt], Field(min_length=1)] = field(default_factory=lambda: [0])
    processes: Count = 1
    """Number of runs that train at the same time, each with its share of the cores."""
    only: list[str] | None = None
    """Names of the runs to train now; None: all."""
    engine: EngineSettings = field(default_factory=EngineSettings)
    overwrite: StrictBool = False
    """Whether finished measurements are done again."""
    output: OutputFolder = "outputs/study"

    def __post_init__(self) -> None:
        if CONTROL not in self.runs:
            raise ValueError(f"runs={list(self.runs)} has no {CONTROL!r}: every run is compared with it")
        compressed = [name for name in self.runs if name != CONTROL]
        for name in filter(None, map(bytes_budget, self.budgets)):
            if share_of(name) is None and name not in compressed:
                raise ValueError(f"budgets: bytes:{name}: expected one of the runs {', '.join(compressed)}")
        if len({*self.seeds}) < len(self.seeds):
            raise ValueError(f"seeds={self.seeds}: give each once")
        for setting, names in (("only", self.only or ()), ("further", self.further)):
            if unknown := sorted({*names} - {*self.runs}):
                raise ValueError(f"{setting}={unknown}: expected some of {', '.join(self.runs)}")


@dataclass(frozen=True)
class StudyRun:
    """One training of a study."""

    name: str
    seed: int | None
    """Seed of the run; None: a base."""
    folder: Path
    arguments: tuple[str, ...]
    """Arguments of `dmc train`."""

    @property
    def label(self) -> str:
        """Name and seed."""
        return self.folder.name

    @property
    def log(self) -> Path:
        """What the training says."""
        return self.folder.with_name(f"{self.label}.log")

    @property
    def final(self) -> Path:
        """Exported model."""
        return self.folder / "final"

    def train(self, threads: int) -> bool:
        """Run `dmc train` and return whether it has finished."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # threads that wait spin by default: beside any other process that made a step 20 to 50 times as slow
        environment = {"OMP_WAIT_POLICY": "passive"} | os.environ | {"OMP_NUM_THREADS": str(threads)}
        with self.log.open("a") as log:
            command = [sys.executable, "-m", "dmc", "train", *self.arguments]
            print("$", *command, file=log, flush=True)
            return subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode == 0


def plan_bases(config: StudyConfig) -> list[StudyRun]:
    """List the bases in their order."""
    return [_plan(config, name, None, arguments) for name, arguments in config.bases.items()]


def plan_runs(config: StudyConfig) -> list[StudyRun]:
    """List the runs of all seeds, the first seed of each before the second of any."""
    names = [name for name in config.runs if config.only is None or name in (*config.only, CONTROL)]
    return [_plan(config, name, seed, config.runs[name]) for seed in config.seeds for name in names]


def _plan(config: StudyConfig, name: str, seed: int | None, arguments: Sequence[str]) -> StudyRun:
    folder = Path(config.output) / (name if seed is None else f"{name}-s{seed}")
    output = [f"output_dir={folder}", *([] if seed is None else [f"seed={seed}"])]
    return StudyRun(name, seed, folder, (*arguments, *config.arguments, *output))


def train_runs(runs: Sequence[StudyRun], processes: int) -> list[StudyRun]:
    """Train runs; a stopped one resumes, a finished one is reused if it has these settings and these weights.

    Args:
        runs: runs in the order of their start.
        processes: number of runs at the same time.
    Returns:
        The runs that failed, or are others; their output is in `StudyRun.log`.
    """
    threads = max(1, available_cores() // processes)
    with ThreadPoolExecutor(processes) as pool, tqdm(total=len(runs), unit="run", smoothing=0) as bar:

        def train(run: StudyRun) -> bool:
            finished = run.train(threads)
            bar.write(f"{run.label}: {'finished' if finished else f'failed, see {run.log}'}", file=sys.stderr)
            bar.update()
            return finished

        return [run for run, finished in zip(runs, pool.map(train, runs), strict=True) if not finished]


def check_measurements(config: StudyConfig, configs: Path) -> None:
    """Look up all policies, budgets and tasks, so that what cannot be measured fails before hours of training.

    Raises:
        ValueError, FileNotFoundError: see `plan_grid`; or the full cache, or a policy of `further`, is not among them.
    """
    policies = named_settings(config.policies, configs / "policy", "policies")
    built = [policy for method in plan_methods(policies, config.budgets) if (policy := method.build()) is not None]
    for path in (path for policy in built for path in policy.files):
        if not path.is_file():
            raise FileNotFoundError(f"policies: {path} does not exist")
    if FULL not in policies:
        raise ValueError(f"policies={[*policies]} lacks {FULL!r}: every run is compared with the control's full cache")
    for run, names in config.further.items():
        for unknown in {*names} - {*policies}:
            raise ValueError(f"further.{run}: {unknown!r} is none of the policies; {suggest(unknown, policies)}")
    plan_tasks(_grid(config, {CONTROL: ""}, []), configs, "")


def evaluate_runs(config: StudyConfig, runs: Sequence[StudyRun], configs: Path) -> str:
    """Run all policies on the controls, and compare every other model with the control of its seed.

    Args:
        config: policies, budgets, tasks.
        runs: finished ones.
        configs: folder that holds `policy/*.yaml` and `task/*.yaml`.
    Returns:
        The tables of these runs under these settings; the folder `compare` may hold others.
    Raises:
        ValueError, FileNotFoundError, ArithmeticError: see `compare`.
    """
    seeds, there = [run.seed for run in runs if run.name == CONTROL], {run.name for run in runs}
    models: dict[str, Any] = {}
    for run in (run for run in runs if run.seed in seeds):
        models[run.label] = {"path": str(run.final), "variant": run.name, "seed": run.seed}
        models[run.label]["policies"] = None if run.name == CONTROL else [FULL, *config.further.get(run.name, ())]
    if not models:
        return "no control is finished: there is nothing to compare with"
    compressed = there - {CONTROL}

    def can_be_met(budget: Any) -> bool:
        whose = bytes_budget(budget)
        return whose is None or share_of(whose) is not None or (whose in compressed if whose else bool(compressed))

    grid = _grid(config, models, [*filter(can_be_met, config.budgets)])
    return compare(grid, configs, load_with_tokenizer, metrics=METRICS, only_this_grid=True)


def _grid(config: StudyConfig, models: dict[str, Any], budgets: list[Any]) -> CompareConfig:
    return CompareConfig(
        models, config.policies, config.tasks, budgets, config.engine, reference=CONTROL,
        overwrite=config.overwrite, output=str(Path(config.output) / "compare"),
    )  # fmt: skip


def run_study(config: StudyConfig, configs: Path) -> str | None:
    """Train what is not finished, measure, and print the tables.

    Args:
        config: the study.
        configs: folder of all settings.
    Returns:
        What has failed; None: nothing.
    """
    check_measurements(config, configs)
    for base in plan_bases(config):  # each may start from the one before
        if train_runs([base], processes=1):
            return f"error: {base.label} failed, see {base.log}"
    runs = plan_runs(config)
    failed = train_runs(runs, config.processes)
    try:
        print(evaluate_runs(config, [run for run in runs if run not in failed], configs))
    finally:
        if names := [f"{run.label} ({run.log})" for run in failed]:
            print(f"failed: {', '.join(names)}", file=sys.stderr)
    return f"error: {len(failed)} trainings failed" if failed else None


def main(settings: Any) -> None:
    """Run a study; it ends non-zero where a training failed."""
    sys.exit(run_study(build_config(StudyConfig, settings), CONFIGS))
