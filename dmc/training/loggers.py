"""Loggers of a run's metrics: CSV files always, and those of the group `logger`."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from dmc.config.instantiate import instantiate
from dmc.ranks import is_rank_zero
from dmc.results.provenance import git_commit
from dmc.training.config import RunConfig

WANDB_ID = Path("wandb") / "run_id"
"""File with the run's id at wandb, in its output folder: every start continues the same wandb run."""


@contextmanager
def open_loggers(config: RunConfig) -> Iterator[list[Logger]]:
    """Make the loggers of a run; at the end wandb is finished, so that a next run in this process gets its own."""
    loggers = [instantiate(settings, f"logger.{name}", Logger) for name, settings in config.logger.items()]
    if not any(isinstance(logger, CSVLogger) for logger in loggers):
        loggers.insert(0, CSVLogger(config.output_dir, name="logs"))
    failed = True
    try:
        yield loggers
        failed = False
    finally:
        if "wandb" in sys.modules:
            sys.modules["wandb"].finish(exit_code=int(failed))


def wandb_logger(save_dir: str, **options: Any) -> WandbLogger:
    """Make a logger that never prompts: online if you are logged in, else offline.

    WANDB_MODE=offline, or disabled, says so beforehand. Only rank 0 opens it at wandb.

    Args:
        save_dir: the run's folder.
        options: options of Lightning's WandbLogger.
    """
    if not is_rank_zero():
        return WandbLogger(save_dir=save_dir, **options)
    import wandb

    commit, mode = git_commit() or "unknown", os.environ.get("WANDB_MODE", "online")
    if mode == "online" and not wandb.login(prompt=False, verify=False):
        mode = "offline"
    options = {"notes": f"commit {commit}", "tags": [f"commit-{commit[:12]}"], **options}
    options |= {"save_dir": save_dir, "id": _run_id(Path(save_dir) / WANDB_ID)}
    # WandbLogger's own `offline` would set WANDB_MODE for the whole process
    return WandbLogger(mode=mode, **options)


def _run_id(path: Path) -> str:
    """Read the run's id at wandb, or choose one."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:8])
    return path.read_text().strip()
