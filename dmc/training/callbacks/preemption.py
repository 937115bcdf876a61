"""Preemption of runs: save the last full step on all ranks, requeue the Slurm job, stop."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import threading
from typing import Any

import torch
from lightning import Callback, Trainer

from dmc.ranks import ALONE
from dmc.training.callbacks.save_last import SaveLast
from dmc.training.optimizer_step import OptimizerStep

REQUEUE_SIGNALS = frozenset({signal.SIGUSR1, signal.SIGUSR2})
"""Signals before the time limit (`--signal`): SIGUSR1 in our job files, SIGUSR2 under submitit."""
SIGNALS = REQUEUE_SIGNALS | {signal.SIGTERM}
EXIT_PREEMPTED = 75
"""Exit code of a run that saved and stopped (EX_TEMPFAIL: try again)."""
logger = logging.getLogger(__name__)


class PreemptedError(Exception):
    """Raised when a run has saved its state and stopped on a signal; the same command continues it."""


class Preemption(Callback):
    """Saves and stops after the micro-batch in which any rank got a signal; requeues the job on `REQUEUE_SIGNALS`.

    The checkpoint is of the last full step, the present state of weights, optimizer and data: the gradients of an
    unfinished step are dropped, and the next start repeats it. The handlers only record the signal: a rank that saved
    from inside one would wait for ranks in mid-step. As a context around the run it also keeps `REQUEUE_SIGNALS` from
    killing the process before the first step.

    Args:
        save_last: writes the checkpoint.
        optimizer_step: takes the run's steps.
    """

    def __init__(self, save_last: SaveLast, optimizer_step: OptimizerStep) -> None:
        self.save_last, self.optimizer_step = save_last, optimizer_step
        self.hosts = ALONE
        self._received: set[int] = set()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Preemption:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self._listen(REQUEUE_SIGNALS)
        return self

    def __exit__(self, *_: object) -> None:
        if _in_main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Listen to SIGTERM too, instead of Lightning, whose handler waits for the other ranks."""
        self._listen(SIGNALS)
        self.hosts = pl_module.strategy.hosts

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        """Agree with the other ranks after each micro-batch, the last one only once its step is done."""
        if not self.optimizer_step.is_last_micro_batch:
            self.stop_if_signaled(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Agree with the other ranks after a step."""
        self.stop_if_signaled(trainer, pl_module)

    def stop_if_signaled(self, trainer: Trainer, pl_module: Any) -> None:
        """Save, requeue and stop if any rank got a signal; called by all ranks together.

        Raises:
            PreemptedError: one did; on all ranks.
        """
        received = bool(self._received), bool(self._received & REQUEUE_SIGNALS)
        stops, requeue = self.hosts.all_reduce(torch.tensor(received, dtype=torch.int64)).tolist()
        if not stops:
            return
        folder, step = self.save_last.folder.parent, trainer.global_step
        if step > 0:
            self.save_last.save(trainer, step)
        saved = f"which is saved in {folder}" if step else "with nothing to save yet"
        message = f"stopped by a signal after step {step} of {trainer.max_steps}, {saved}: the same command goes on"
        logger.warning(message)  # now: a requeued job is soon killed
        if requeue and trainer.is_global_zero:
            requeue_job()
        raise PreemptedError(message)

    def _listen(self, numbers: frozenset[signal.Signals]) -> None:
        if _in_main_thread():  # Python allows handlers nowhere else
            for number in numbers:
                signal.signal(number, lambda received, frame: self._received.add(received))


def leave_signals_to_parent(_worker: int) -> None:
    """Make a data worker ignore signals, which Slurm sends to every process: a killed worker would be an error."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def requeue_job() -> None:
    """Requeue this Slurm job, with the same files; outside Slurm do nothing."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return
    if "SLURM_ARRAY_JOB_ID" in os.environ:  # the number alone may mean the whole array
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    command = ["scontrol", "requeue", job]
    if shutil.which(command[0]) is None:
        return logger.warning("there is no scontrol in this container: the job file requeues the job")
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        logger.warning("%s failed (%s): submit the job again to go on", " ".join(command), str(reason).strip())


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
