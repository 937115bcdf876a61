"""Loggers of a run's metrics: CSV files always, and those of the group `logger`."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from dmc.config import RunConfig
from dmc.provenance import git_commit
from dmc.target import build_targets
from dmc.training.record import is_rank_zero

logger = logging.getLogger(__name__)
WANDB_ID = Path("wandb") / "run_id"
"""File with the run's id at wandb, in its output folder: every start continues the same wandb run."""


@contextmanager
def open_loggers(config: RunConfig) -> Iterator[list[Logger]]:
    """Make the loggers of a run; at the end wandb is finished, so that a next run in this process gets its own."""
    loggers = build_targets(config.logger, "logger", Logger)
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


def wandb_logger(save_dir: str, mode: Literal["auto", "online", "offline"] = "auto", **options: Any) -> WandbLogger:
    """Make a logger that never prompts; only rank 0 opens it at wandb.

    Args:
        save_dir: the run's folder.
        mode: auto: WANDB_MODE, else online if you are logged in and the server answers, else offline; online: refused
            without these.
        options: options of Lightning's WandbLogger.
    Raises:
        ValueError: the mode is unknown, or online is requested without a login or a network.
    """
    if is_rank_zero():
        commit = git_commit() or "unknown"
        # WandbLogger's own `offline` would set WANDB_MODE for the whole process
        options = {"notes": f"commit {commit}", "tags": [f"commit-{commit[:12]}"], **options}
        options |= {"mode": choose_wandb_mode(mode), "id": _run_id(Path(save_dir) / WANDB_ID)}
        if options["mode"] == "online":
            import wandb

            opened = SteadyWandbLogger(save_dir=save_dir, **options)
            try:
                _ = opened.experiment  # asks the server
                return opened
            except wandb.errors.Error as error:
                reason = str(error).splitlines()[0]
                wandb.teardown()  # its process goes on trying, and holds the id
                if mode == "online":
                    raise ValueError(f"mode=online, but wandb cannot be reached ({reason}): use mode=auto") from error
                logger.warning("wandb cannot be reached (%s): figures are kept offline, for `wandb sync`", reason)
                options["mode"] = "offline"
    return SteadyWandbLogger(save_dir=save_dir, **options)


def choose_wandb_mode(mode: str) -> str:
    """Return the mode in which wandb never prompts.

    Raises:
        ValueError: the mode is unknown, or online is requested without a login.
    """
    if mode not in ("auto", "online", "offline"):
        raise ValueError(f"mode={mode!r}: expected one of auto, online, offline")
    if mode == "offline":
        return "offline"
    wanted = os.environ.get("WANDB_MODE", "online")
    if mode == "auto" and wanted != "online":
        return wanted
    import wandb

    if wandb.login(prompt=False, verify=False):
        return "online"
    if mode == "online":
        raise ValueError(
            "mode=online, but nobody is logged in: run `wandb login`, set WANDB_API_KEY, or use mode=offline and "
            "`wandb sync` later"
        )
    return "offline"


def _run_id(path: Path) -> str:
    """Read the run's id at wandb, or choose one."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:8])
    return path.read_text().strip()
