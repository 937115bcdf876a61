"""Watchdog of hanging runs: writes the stacks of all threads to a file, after a timeout or on demand."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer

DUMP_SIGNAL = signal.SIGQUIT
"""Signal that dumps the stacks without stopping the run."""
SLACK = 5.0
"""Seconds after which a waiting Python thread is taken to be blocked forever."""
logger = logging.getLogger(__name__)


class HangWatchdog(Callback):
    """Writes the stacks of all threads to a file when no micro-batch ends for too long, and on `DUMP_SIGNAL`.

    `faulthandler` alone would read stacks while their threads run, which can crash the process: a thread dumps them
    while it holds the interpreter. Only if the interpreter is never released, so that no stack changes either, is the
    dump without Python used. Nothing is killed: a slow validation or export costs a dump. NCCL's flight recorder writes
    the ranks' collectives to the same folder when one of them times out.

    Args:
        folder: gets `rank0.txt`, one for each rank that dumps.
        seconds: time without a micro-batch before a dump, which follows after at most twice as long; 0: on demand.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self._file: Any = None
        self._num_moves = 0
        self._over = threading.Event()
        recorder = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{folder.absolute()}/nccl_"}
        for name, value in recorder.items():  # read when the process group is made
            os.environ.setdefault(name, value)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start watching: the wait for the first batch counts."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = (self.folder / f"rank{trainer.global_rank}.txt").open("a")
        faulthandler.register(DUMP_SIGNAL, self._file, all_threads=True)
        self._watch = threading.Thread(target=self._watch_steps, args=(trainer,), name="hang-watchdog", daemon=True)
        if self.seconds:
            self._watch.start()

    def on_train_batch_end(self, *_: Any) -> None:
        """Reset the timer."""
        self._num_moves += 1

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop watching; leave no empty file behind."""
        if self._file is None:
            return
        self._over.set()
        if self.seconds:
            self._watch.join()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(DUMP_SIGNAL)
        path, self._file = Path(self._file.name), self._file.close()
        if path.stat().st_size == 0:
            path.unlink()
        with suppress(OSError):  # another rank's dump or removal
            self.folder.rmdir()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop watching a run that failed."""
        self.teardown(trainer, pl_module, "fit")

    def _watch_steps(self, trainer: Trainer) -> None:
        seen = 0
        while True:
            # As long as this thread runs, it puts off the dump that needs no Python.
            faulthandler.dump_traceback_later(2 * self.seconds + SLACK, repeat=True, file=self._file)
            if self._over.wait(self.seconds):
                return
            if self._num_moves == seen:
                faulthandler.dump_traceback(self._file, all_threads=True)
                message = "nothing has moved for %g s in step %d: stacks of all threads are in %s"
                logger.warning(message, self.seconds, trainer.global_step, self._file.name)
            seen = self._num_moves
