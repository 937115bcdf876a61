"""Where a run's figures go: CSV files always, and what the group `logger` names."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from dmc.config import RunConfig
from dmc.provenance import git_commit
from dmc.target import build_targets
from dmc.training.record import is_rank_zero

WANDB_ID = Path("wandb") / "run_id"
"""The run's name at wandb, in its output folder: every start of a run goes on with the same."""


@contextmanager
def open_loggers(config: RunConfig) -> Iterator[list[Logger]]:
    """Make the loggers of a run; at the end wandb is told, so that a next run in this process has its own.

    Raises:
        ValueError: a logger cannot be made, see `wandb_logger`.
    """
    loggers = build_targets(config.logger, "logger", Logger)
    if not any(isinstance(each, CSVLogger) for each in loggers):
        loggers.insert(0, CSVLogger(config.output_dir, name="logs"))
    failed = True
    try:
        yield loggers
        failed = False
    finally:
        if "wandb" in sys.modules:
            sys.modules["wandb"].finish(exit_code=int(failed))


def wandb_logger(save_dir: str, mode: Literal["auto", "online", "offline"] = "auto", **options: Any) -> WandbLogger:
    """Make a logger that has nothing to ask for; only rank 0 opens it at wandb.

    Args:
        save_dir: the run's folder.
        mode: auto: what WANDB_MODE says, else online if you are logged in, else offline; online: refused without a
            login.
        options: of Lightning's WandbLogger.
    Raises:
        ValueError: the mode is unknown, or online is wanted without a login.
    """
    if is_rank_zero():
        commit = git_commit() or "unknown"
        # WandbLogger's own `offline` would set WANDB_MODE for the whole process
        options = {"notes": f"commit {commit}", "tags": [f"commit-{commit[:12]}"], **options}
        options |= {"mode": choose_wandb_mode(mode), "id": _run_id(Path(save_dir) / WANDB_ID)}
    return WandbLogger(save_dir=save_dir, **options)


def choose_wandb_mode(mode: str) -> str:
    """Return the mode for wandb, in which it has nothing to ask for.

    Raises:
        ValueError: the mode is unknown, or online is wanted without a login.
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
    """Read the run's name at wandb, or choose one."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:8])
    return path.read_text().strip()
