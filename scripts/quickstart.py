"""The main job on the embedded default: python scripts/quickstart.py [settings of the retrofit, e.g. seed=1].

Settings after --base go to the base's pretraining, those after --retrofit (the default) to retrofit and control.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from dmc.config.command_line import errors_in_one_line, plain_settings, prepare_process

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def experiment(name: str, overrides: list[str]) -> Any:
    """Compose and check one of the quickstart's experiments."""
    from dmc.training.config import run_config

    settings = plain_settings("train", overrides, CONFIGS)
    return run_config(compose("train", overrides=[f"experiment=quickstart_{name}", *settings]))


def main() -> None:
    overrides: dict[str, list[str]] = {"--base": [], "--retrofit": []}
    chosen = "--retrofit"
    for argument in sys.argv[1:]:
        if argument in overrides:
            chosen = argument
        else:
            overrides[chosen].append(argument)
    with errors_in_one_line():
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            base = experiment("base", overrides["--base"])
            control, retrofit = (experiment(name, overrides["--retrofit"]) for name in ("control", "retrofit"))
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
