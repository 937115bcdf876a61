"""Train one run: a retrofit, its control, or a base."""

from __future__ import annotations

import sys
import traceback
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from dmc.config import build_config
from dmc.config.command_line import INPUT_ERRORS
from dmc.training.config import PlanConfig, run_config

EXIT_CRASHED = 70
"""Exit code after a failure of a GPU, of NCCL or the network, or for want of memory: another start may go on."""


def main(settings: Any) -> None:
    """Train, or print the run's plan.

    Raises:
        ValueError, OSError, ImportError: wrong settings, before anything is written.
    """
    is_sweep = HydraConfig.get().mode is RunMode.MULTIRUN
    if is_sweep:
        settings["output_dir"] = HydraConfig.get().runtime.output_dir  # a folder of its own for every run of the sweep
    plan = build_config(PlanConfig, {name: settings.pop(name) for name in ("plan", "planner")})
    config = run_config(settings, HydraConfig.get().overrides.task)  # checked before all that is imported next
    from dmc.training.callbacks.preemption import EXIT_PREEMPTED, PreemptedError
    from dmc.training.planning.planner import print_plan
    from dmc.training.run import train

    if plan.plan:
        return print_plan(config, plan.planner, as_json=plan.plan == "json")
    try:
        run = train(config)
    except PreemptedError as stop:
        print(stop)
        sys.exit(EXIT_PREEMPTED)
    except (RuntimeError, MemoryError, ConnectionError) as error:  # of torch, and of text that streams from the hub
        if is_sweep or (isinstance(error, INPUT_ERRORS) and not isinstance(error, ConnectionError)):
            raise
        traceback.print_exc()
        sys.exit(EXIT_CRASHED)
    print(f"exported {run.final}")
