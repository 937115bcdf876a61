"""Train the runs of a study, several at the same time, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from dmc.data.cache import available_cores
from dmc.study.plan import StudyRun


def train_runs(runs: Sequence[StudyRun], script: Path, processes: int) -> list[StudyRun]:
    """Train what is not finished; a run that was stopped goes on where it stood.

    Args:
        runs: in the order in which they begin.
        script: `scripts/train.py`.
        processes: runs at the same time.
    Returns:
        The runs that failed; what they printed is in `FOLDER.log` beside their folder.
    """
    waiting = [run for run in runs if not run.is_finished]
    threads = max(1, available_cores() // processes)
    with ThreadPoolExecutor(processes) as pool, tqdm(total=len(waiting), unit="run", smoothing=0) as bar:

        def train(run: StudyRun) -> bool:
            finished = _train(run, script, threads)
            bar.write(f"{run.label}: {'finished' if finished else f'failed, see {log_of(run)}'}", file=sys.stderr)
            bar.update()
            return finished

        return [run for run, finished in zip(waiting, pool.map(train, waiting), strict=True) if not finished]


def log_of(run: StudyRun) -> Path:
    """Return where a run's output is kept."""
    return run.folder.with_name(f"{run.folder.name}.log")


def _train(run: StudyRun, script: Path, threads: int) -> bool:
    log_of(run).parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with log_of(run).open("a") as log:
        command = [sys.executable, str(script), *run.arguments]
        print("$", *command, file=log, flush=True)
        return subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode == 0
