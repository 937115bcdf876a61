"""Loggers of a run's metrics: CSV files always, and those of the group `logger`."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from dmc.config.instantiate import instantiate
from dmc.results.provenance import git_commit
from dmc.training.config import RunConfig
from dmc.training.record import is_rank_zero

logger = logging.getLogger(__name__)
WANDB_ID = Path("wandb") / "run_id"
"""File with the run's id at wandb, in its output folder: every start continues the same wandb run."""


@contextmanager
def open_loggers(config: RunConfig) -> Iterator[list[Logger]]:
    """Make the loggers of a run; at the end wandb is finished, so that a next run in this process gets its own."""
    loggers = [instantiate(settings, f"logger.{name}", Logger) for name, settings in config.logger.items()]
    if not any(isinstance(each, CSVLogger) for each in loggers):
        loggers.insert(0, CSVLogger(config.output_dir, name="logs"))
    failed = True
    try:
        yield loggers
        failed = False
    finally:
        if "wandb" in sys.modules:
            wandb: Any = sys.modules["wandb"]
            try:
                wandb.finish(exit_code=int(failed))
            except OSError:  # its process is gone
                wandb.run = None
                with suppress(OSError):
                    wandb.teardown()


class SteadyWandbLogger(WandbLogger):
    """Lets a run continue if wandb's process is gone: a job's signals reach that process too."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """See Lightning's."""
        self._try(super().log_metrics, metrics, step)

    def log_image(self, key: str, images: list[Any], step: int | None = None, **options: Any) -> None:
        """See Lightning's."""
        self._try(super().log_image, key, images, step, **options)

    def finalize(self, status: str) -> None:
        """See Lightning's."""
        self._try(super().finalize, status)

    def _try(self, act: Callable[..., None], *arguments: Any, **options: Any) -> None:
        try:
            act(*arguments, **options)
        except OSError as error:
            logger.warning("wandb is gone (%s): what it has not got is in the CSV files", error)
            self._try = lambda *_, **__: None  # type: ignore[method-assign]


def wandb_logger(save_dir: str, **options: Any) -> WandbLogger:
    """Make a logger that never prompts: online if you are logged in and the server answers, else offline.

    WANDB_MODE=offline, or disabled, says so beforehand. Only rank 0 opens it at wandb.

    Args:
        save_dir: the run's folder.
        options: options of Lightning's WandbLogger.
    """
    if not is_rank_zero():
        return SteadyWandbLogger(save_dir=save_dir, **options)
    import wandb

    commit, mode = git_commit() or "unknown", os.environ.get("WANDB_MODE", "online")
    if mode == "online" and not wandb.login(prompt=False, verify=False):
        mode = "offline"
    options = {"notes": f"commit {commit}", "tags": [f"commit-{commit[:12]}"], **options}
    options |= {"save_dir": save_dir, "id": _run_id(Path(save_dir) / WANDB_ID)}
    # WandbLogger's own `offline` would set WANDB_MODE for the whole process
    opened = SteadyWandbLogger(mode=mode, **options)
    if mode == "online":
        try:
            _ = opened.experiment  # asks the server
        except wandb.errors.Error as error:
            wandb.teardown()  # its process goes on trying, and holds the id
            reason = str(error).splitlines()[0]
            logger.warning("wandb cannot be reached (%s): figures are kept offline, for `wandb sync`", reason)
            return SteadyWandbLogger(mode="offline", **options)
    return opened


def _run_id(path: Path) -> str:
    """Read the run's id at wandb, or choose one."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:8])
    return path.read_text().strip()
