"""Callbacks of runs that crash; a job names them as `callbacks.crash._target_`, this folder being in PYTHONPATH."""

import os
import signal
import time
from pathlib import Path

from lightning import Callback


class Crash(Callback):
    """Crashes at steps: the second rank is killed, or, with an `error`, raises it.

    Args:
        steps: numbers of done steps at which to crash.
        marks: a folder in which each crash leaves its step, so that it does not come again; None: it does.
        every: steps from one checkpoint to the next: the crash waits for the last one, written in the background.
        error: name of a built-in exception; None: SIGKILL.
    """

    def __init__(self, steps, marks=None, every=None, error=None):
        self.steps, self.marks, self.every, self.error = steps, marks, every, error

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_rank != 1 or trainer.global_step not in self.steps:
            return
        if self.marks is not None:
            mark = Path(self.marks) / str(trainer.global_step)
            if mark.exists():
                return
            mark.touch()
        if self.every is not None:
            saved = trainer.global_step - trainer.global_step % self.every
            checkpoint = Path(trainer.default_root_dir) / "checkpoints" / f"step_{saved:07d}"
            while not checkpoint.exists():
                time.sleep(0.05)
        if self.error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        raise getattr(__import__("builtins"), self.error)("this rank's GPU has fallen off the bus")
