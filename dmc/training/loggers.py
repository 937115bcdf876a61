"""Where a run's figures go: CSV files always, wandb on request."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from dmc.config import LoggerConfig, RunConfig
from dmc.provenance import git_commit
from dmc.training.record import is_rank_zero

WANDB_ID = Path("wandb") / "run_id"
"""The run's name at wandb, in its output folder: every start of a run goes on with the same."""


@contextmanager
def open_loggers(config: RunConfig) -> Iterator[list[Logger]]:
    """Make the loggers of a run; at the end wandb is told, so that a next run in this process has its own.

    Raises:
        ValueError: see `choose_wandb_mode`.
    """
    folder = Path(config.output_dir)
    csv = CSVLogger(folder, name="logs")
    if config.logger.wandb_project is None:
        yield [csv]
        return
    import wandb

    try:
        yield [csv, _wandb_logger(config, folder)]
    except BaseException:
        wandb.finish(exit_code=1)
        raise
    wandb.finish()


def choose_wandb_mode(settings: LoggerConfig) -> str:
    """Return the mode for wandb, in which it has nothing to ask for.

    Raises:
        ValueError: online is wanted without a login.
    """
    if settings.wandb_mode == "offline":
        return "offline"
    wanted = os.environ.get("WANDB_MODE", "online")
    if settings.wandb_mode == "auto" and wanted != "online":
        return wanted
    import wandb

    if wandb.login(prompt=False, verify=False):
        return "online"
    if settings.wandb_mode == "online":
        raise ValueError(
            "logger.wandb_mode=online, but nobody is logged in: run `wandb login`, set WANDB_API_KEY, or use "
            "logger.wandb_mode=offline and `wandb sync` later"
        )
    return "offline"


def _wandb_logger(config: RunConfig, folder: Path) -> WandbLogger:
    """Make the logger; only rank 0 opens it at wandb. Its own `offline` would set WANDB_MODE for the whole process."""
    options: dict[str, Any] = {}
    if is_rank_zero():
        commit = git_commit() or "unknown"
        options = {
            "mode": choose_wandb_mode(config.logger),
            "id": _run_id(folder / WANDB_ID),
            "config": dataclasses.asdict(config),
            "notes": f"commit {commit}",
            "tags": [f"commit-{commit[:12]}"],
        }
    return WandbLogger(project=config.logger.wandb_project, save_dir=folder, **options)


def _run_id(path: Path) -> str:
    """Read the run's name at wandb, or choose one."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:8])
    return path.read_text().strip()
