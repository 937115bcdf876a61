"""Train one run: python scripts/train.py experiment=llama2_7b_cr4 (any setting can be overridden, see configs/)."""

from __future__ import annotations

import sys
import traceback

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from dmc.config.command_line import INPUT_ERRORS, script

EXIT_CRASHED = 70
"""Exit code after a failure of the machine, as of a GPU, of NCCL or for want of memory: another start may go on."""


@script("train")
def main(settings: DictConfig) -> None:
    from dmc.config import build_config
    from dmc.training.config import PlannerConfig, run_config

    if HydraConfig.get().mode is RunMode.MULTIRUN:
        settings.output_dir = HydraConfig.get().runtime.output_dir  # a folder of its own for every run of the sweep
    if settings.plan not in (True, False, "json"):
        raise ValueError(f"plan={settings.plan}: expected true, false or json")
    config = run_config(settings)  # checked before all that is imported next
    planner = build_config(PlannerConfig, dict(settings.planner), "planner") if settings.plan else None
    from dmc.training.callbacks.preemption import EXIT_PREEMPTED, PreemptedError
    from dmc.training.planning.planner import print_plan
    from dmc.training.run import train

    if planner is not None:
        return print_plan(config, planner, as_json=settings.plan == "json")
    try:
        run = train(config)
    except PreemptedError as stop:
        print(stop)
        sys.exit(EXIT_PREEMPTED)
    except (RuntimeError, MemoryError) as error:  # what torch raises
        if isinstance(error, INPUT_ERRORS) or HydraConfig.get().mode is RunMode.MULTIRUN:
            raise
        traceback.print_exc()
        sys.exit(EXIT_CRASHED)
    print(f"exported {run.final}")


if __name__ == "__main__":
    main()
