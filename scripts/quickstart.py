"""The main job on the embedded default: python scripts/quickstart.py [settings of the retrofit, e.g. seed=1].

Settings after --base go to the base's pretraining, those after --retrofit (the default) to retrofit and control.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra_command import CONFIGS, exit_in_one_line


def main() -> None:
    overrides: dict[str, list[str]] = {"--base": [], "--retrofit": []}
    chosen = "--retrofit"
    for argument in sys.argv[1:]:
        if argument in ("-h", "--help"):
            return print(__doc__)
        if argument in overrides:
            chosen = argument
        else:
            overrides[chosen].append(argument)

    def experiment(name: str, settings: list[str]) -> Any:
        return compose("train", overrides=[f"experiment=quickstart_{name}", *settings])

    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            base = experiment("base", overrides["--base"])
            control, retrofit = (experiment(name, overrides["--retrofit"]) for name in ("control", "retrofit"))
        run(base, control, retrofit)
    except Exception as error:
        exit_in_one_line(error)


def run(*settings: Any) -> None:
    from dmc.config.command_line import plain_values, prepare_process
    from dmc.training.config import run_config

    base, control, retrofit = (run_config(plain_values(composed)) for composed in settings)
    from dmc.commands.quickstart import run_quickstart  # seconds, which wrong settings do not wait for
    from dmc.training.callbacks.preemption import EXIT_PREEMPTED, PreemptedError

    prepare_process()
    try:
        run_quickstart(base, control, retrofit, Path("outputs/quickstart"), CONFIGS)
    except PreemptedError as stop:
        print(stop)
        sys.exit(EXIT_PREEMPTED)


if __name__ == "__main__":
    main()
