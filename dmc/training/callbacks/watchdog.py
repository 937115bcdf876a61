"""A run that hangs says where: stacks of all threads in a file, by themselves after a while, or on demand."""

from __future__ import annotations

import faulthandler
import logging
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer

DUMP_SIGNAL = signal.SIGQUIT
"""Dumps the stacks and lets the run go on."""
SLACK = 5.0
"""Seconds after which a thread of Python that wants to run is taken to be kept from it for good."""
logger = logging.getLogger(__name__)


class HangWatchdog(Callback):
    """Writes the stacks of all threads to a file when no micro-batch begins or ends for too long, and on `DUMP_SIGNAL`.

    A thread of its own dumps them while it holds the interpreter, so that no stack changes while it is read: reading
    the stacks of threads that run can end the process. Where a collective or a kernel holds the interpreter and never
    returns, no stack changes either, and a dump that needs no Python follows after at most twice the time.
    Nothing is killed: a slow validation or export costs a dump.

    Args:
        folder: gets `rank0.txt`, one for each rank that dumps.
        seconds: until a dump, and between further ones; 0: on demand only.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self._file: Any = None
        self._moved = 0.0
        self._over = threading.Event()
        self._watch: threading.Thread | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch from here: waiting for the first batch counts."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = (self.folder / f"rank{trainer.global_rank}.txt").open("a")
        faulthandler.register(DUMP_SIGNAL, self._file, all_threads=True)
        self._moved = time.monotonic()
        if self.seconds:
            self._over.clear()
            self._watch = threading.Thread(target=self._watch_steps, args=(trainer,), name="hang-watchdog", daemon=True)
            self._watch.start()

    def on_train_batch_start(self, *_: Any) -> None:
        """Start counting anew."""
        self._moved = time.monotonic()

    def on_train_batch_end(self, *_: Any) -> None:
        """Start counting anew."""
        self._moved = time.monotonic()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop watching."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop watching a run that failed."""
        self._close()

    def _watch_steps(self, trainer: Trainer) -> None:
        due = self._moved + self.seconds
        while True:
            # As long as this thread runs, it puts off the dump that needs no Python.
            faulthandler.dump_traceback_later(2 * self.seconds + SLACK, repeat=True, file=self._file)
            if self._over.wait(max(due - time.monotonic(), 0.0)):
                return
            if (now := time.monotonic()) >= self._moved + self.seconds:
                faulthandler.dump_traceback(self._file, all_threads=True)
                message = "nothing has moved for %g s in step %d: stacks of all threads are in %s"
                logger.warning(message, self.seconds, trainer.global_step, self._file.name)
                due = now + self.seconds
            else:
                due = self._moved + self.seconds

    def _close(self) -> None:
        """Stop watching; leave no empty file behind."""
        if self._file is None:
            return
        if self._watch is not None:
            self._over.set()
            self._watch.join()
            faulthandler.cancel_dump_traceback_later()
            self._watch = None
        faulthandler.unregister(DUMP_SIGNAL)
        path, self._file = Path(self._file.name), self._file.close()
        if path.stat().st_size == 0:
            path.unlink()
        with suppress(OSError):  # another rank has dumped, or was faster
            self.folder.rmdir()
