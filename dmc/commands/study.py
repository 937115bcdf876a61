"""A reproducible study: bases, retrofits and controls over seeds, all methods at equal bytes, one table.

Trainings run in processes of their own; what they cost is one grid of `dmc.results.compare`. What trainings say of
themselves, `collect` puts into a store of results too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StrictInt
from tqdm import tqdm

from dmc.config.settings import Count, Named, checked_dataclass
from dmc.config.target import build_target
from dmc.data.cache import available_cores
from dmc.files import read_mapping
from dmc.models.loading import load_with_tokenizer
from dmc.results.compare import compare
from dmc.results.equal_bytes import bytes_budget, share_of
from dmc.results.grid import CompareConfig, EngineSettings, named_settings, plan_methods
from dmc.results.measurement import FULL, Row, new_row
from dmc.training.export import METRICS_NAME, is_final, is_of_last_step

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
    """Arguments of `scripts/train.py` by name; bases are trained one after the other, before all runs."""
    runs: Named[list[str]]
    """Arguments of `scripts/train.py` by name; `control` is one of them."""
    policies: list[Any]
    """Training-free methods on the controls, as `scripts/compare.py` has them; `full` among them."""
    budgets: list[Any]
    """Budgets of the policies; a budget in a run's bytes, `bytes:best_cr4`, waits for that run."""
    tasks: list[Any]
    arguments: list[str] = field(default_factory=list)
    """Further arguments of every training: `trainer=auto` takes a GPU, other data or stages a larger study."""
    seeds: Annotated[list[StrictInt], Field(min_length=1)] = field(default_factory=lambda: [0])
    processes: Count = 1
    """Number of runs that train at the same time, each with its share of the cores."""
    only: list[str] | None = None
    """Names of the runs to train now; None: all."""
    engine: EngineSettings = field(default_factory=EngineSettings)
    output: str = "outputs/study"

    def __post_init__(self) -> None:
        if CONTROL not in self.runs:
            raise ValueError(f"runs={list(self.runs)} has no {CONTROL!r}: every run is compared with it")
        for each in filter(None, map(bytes_budget, self.budgets)):
            if share_of(each) is None and each not in self.runs:
                raise ValueError(f"budgets: bytes:{each}: expected one of the runs {', '.join(self.runs)}")
        unknown = sorted({*(self.only or ())} - {*self.runs})
        if unknown:
            raise ValueError(f"only={unknown}: expected some of {', '.join(self.runs)}")


@dataclass(frozen=True)
class StudyRun:
    """One training of a study."""

    name: str
    seed: int | None
    """Seed of the run; None: a base."""
    folder: Path
    arguments: tuple[str, ...]
    """Arguments of `scripts/train.py`."""

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

    @property
    def is_finished(self) -> bool:
        """Whether the model of the last step is exported, with all of its weights."""
        return is_final(self.final)

    def train(self, script: Path, threads: int) -> bool:
        """Run `scripts/train.py` and return whether it has finished."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # threads that wait spin by default: beside any other process that made a step 20 to 50 times as slow
        environment = {"OMP_WAIT_POLICY": "passive"} | os.environ | {"OMP_NUM_THREADS": str(threads)}
        with self.log.open("a") as log:
            command = [sys.executable, str(script), *self.arguments]
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
    own = [f"output_dir={folder}", *([] if seed is None else [f"seed={seed}"])]
    return StudyRun(name, seed, folder, (*arguments, *config.arguments, *own))


def train_runs(runs: Sequence[StudyRun], script: Path, processes: int) -> list[StudyRun]:
    """Train unfinished runs; a stopped run resumes.

    Args:
        runs: runs in the order of their start.
        script: `scripts/train.py`.
        processes: number of runs at the same time.
    Returns:
        The runs that failed; their output is in `StudyRun.log`.
    """
    waiting = [run for run in runs if not run.is_finished]
    threads = max(1, available_cores() // processes)
    with ThreadPoolExecutor(processes) as pool, tqdm(total=len(waiting), unit="run", smoothing=0) as bar:

        def train(run: StudyRun) -> bool:
            finished = run.train(script, threads)
            bar.write(f"{run.label}: {'finished' if finished else f'failed, see {run.log}'}", file=sys.stderr)
            bar.update()
            return finished

        return [run for run, finished in zip(waiting, pool.map(train, waiting), strict=True) if not finished]


def check_measurements(config: StudyConfig, configs: Path) -> None:
    """Look up all policies, budgets and tasks, so that misspelled names fail before hours of training.

    Raises:
        ValueError, FileNotFoundError: see `plan_grid`.
    """
    plan_methods(named_settings(config.policies, configs / "policy", "policies"), config.budgets)
    for name, settings in named_settings(config.tasks, configs / "task", "tasks").items():
        build_target(settings, f"tasks.{name}")


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
        models[run.label]["policies"] = None if run.name == CONTROL else [FULL]
    if not models:
        return "no control is finished: there is nothing to compare with"
    whose = [(budget, bytes_budget(budget)) for budget in config.budgets]
    budgets = [each for each, name in whose if not name or share_of(name) is not None or name in there]
    grid = CompareConfig(
        models, config.policies, config.tasks, budgets, config.engine, reference=CONTROL,
        output=str(Path(config.output) / "compare"),
    )  # fmt: skip
    return compare(grid, configs, load_with_tokenizer, metrics=METRICS, only_own=True)


def collect(folder: Path) -> tuple[list[Row], list[str]]:
    """Read the metrics of all exported models of the runs in a folder, final ones and snapshots.

    For a retrofit also read every layer's ratio at each validation, the paper's figure 7.

    Args:
        folder: folder of one run, or of several at any depth.
    Returns:
        Rows for a `Store`, by target ratio, and the names of runs that have not finished.
    Raises:
        FileNotFoundError: there is no run.
        ValueError: the ratios along a run are damaged.
    """
    from dmc.training.callbacks.validation import RATIOS_NAME
    from dmc.training.record import CONFIG_NAME

    runs = sorted(path.parent for path in folder.rglob(CONFIG_NAME))
    if not runs:
        raise FileNotFoundError(f"{folder} holds no run: folder= is what output_dir= was, of a run or of a sweep")
    rows, unfinished = [], []
    for run in runs:
        name = run.name if run == folder else str(run.relative_to(folder))
        models = [run / "final"] if _is_measured(run / "final") else []
        unfinished += [] if models else [name]
        for path in (*models, *(run / "snapshots").glob("[!.]*")):
            if (path / METRICS_NAME).is_file():
                rows.append(_row_of(f"{name}/{path.name}", read_mapping(path / METRICS_NAME)))
        if (path := run / "heatmaps" / RATIOS_NAME).is_file():
            rows.append(_row_along(name, path))
    return sorted(rows, key=lambda row: (row["requested_ratio"], row["model"])), unfinished


def _is_measured(final: Path) -> bool:
    record = final / METRICS_NAME
    return record.is_file() and is_of_last_step(read_mapping(record)["metrics"])


def _row_of(name: str, record: Mapping[str, Any]) -> Row:
    metrics, compression = record["metrics"], record["compression"]
    split, prefix = ("test", "test_") if "test_loss_nats_per_token" in metrics else ("validation", "")
    figures: Row = {"metrics": {"loss": metrics[f"{split}_loss_nats_per_token"]}, "main_metric": "loss", "split": split}
    figures |= {"higher_is_better": False, "achieved_ratio": metrics[f"{prefix}achieved_ratio"]}
    if compression is not None:
        figures |= {"learned": True, "requested_ratio": compression["target_ratio"]}
    return new_row(name, FULL, "text of the run", {"model": {}, "task": {"split": split}}, **figures)


def _row_along(name: str, path: Path) -> Row:
    from dmc.training.callbacks.validation import read_ratios

    try:
        steps, held = read_ratios(path)
    except (ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged or empty ({type(error).__name__}: {error})") from error
    places = {"step": steps, "layer": [*range(held.shape[1])], "samples": 1}
    figures: Row = {"achieved_ratio": float(1 / held[-1].mean()), "learned": True, "samples": 1}
    figures |= {"requested_ratio": round(figures["achieved_ratio"], 2), "head_ratios": (1 / held[-1]).tolist()}
    figures["by_step"] = places | {"compression_ratio": (1 / held.mean(-1)).tolist()}
    return new_row(name, FULL, "training", {"model": {}, "task": {}}, **figures)
