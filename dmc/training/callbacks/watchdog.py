"""A run that hangs says where: stacks of all threads in a file, by themselves after a while, or on demand."""

from __future__ import annotations

import faulthandler
import logging
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer

DUMP_SIGNAL = signal.SIGQUIT
"""Dumps the stacks and lets the run go on."""
logger = logging.getLogger(__name__)


class HangWatchdog(Callback):
    """Writes the stacks of all threads to a file when no micro-batch begins or ends for too long, and on `DUMP_SIGNAL`.

    The dump needs no Python to run, so that it also comes from inside a collective or a kernel that never returns.
    Nothing is killed: a slow validation or export costs a dump.

    Args:
        folder: gets `rank0.txt`, one for each rank that dumps.
        seconds: until a dump, and between further ones; 0: on demand only.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self._file: Any = None
        self._warning: threading.Timer | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch from here: waiting for the first batch counts."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = (self.folder / f"rank{trainer.global_rank}.txt").open("a")
        faulthandler.register(DUMP_SIGNAL, self._file, all_threads=True)
        self._arm(trainer)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Start counting anew."""
        self._arm(trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Start counting anew."""
        self._arm(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop watching."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop watching a run that failed."""
        self._close()

    def _arm(self, trainer: Trainer) -> None:
        if not self.seconds:
            return
        faulthandler.dump_traceback_later(self.seconds, repeat=True, file=self._file)
        if self._warning is not None:
            self._warning.cancel()
        message = "nothing has moved for %g s in step %d: stacks of all threads are in %s"
        details = [message, self.seconds, trainer.global_step, self._file.name]
        self._warning = threading.Timer(self.seconds, logger.warning, details)
        self._warning.daemon = True
        self._warning.start()

    def _close(self) -> None:
        """Stop watching; leave no empty file behind."""
        if self._file is None:
            return
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(DUMP_SIGNAL)
        if self._warning is not None:
            self._warning.cancel()
        path, self._file = Path(self._file.name), self._file.close()
        if path.stat().st_size == 0:
            path.unlink()
        with suppress(OSError):  # another rank has dumped, or was faster
            self.folder.rmdir()
