"""The main job on the embedded default: python scripts/quickstart.py [settings of the retrofit, e.g. seed=1].

Settings after --base go to the base's pretraining, those after --retrofit (the default) to retrofit and control.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hydra import compose, initialize_config_dir

from dmc.command_line import errors_in_one_line, plain_settings, prepare_process
from dmc.config import RunConfig, run_config
from dmc.quickstart import run_quickstart
from dmc.training import EXIT_PREEMPTED, PreemptedError

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def experiment(name: str, overrides: list[str]) -> RunConfig:
    """Compose one of the quickstart's experiments."""
    settings = plain_settings("train", overrides, CONFIGS)
    return run_config(compose("train", overrides=[f"experiment=quickstart_{name}", *settings]))


def main() -> None:
    prepare_process()
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
        try:
            run_quickstart(base, control, retrofit, Path("outputs/quickstart"), CONFIGS)
        except PreemptedError as stop:
            print(stop)
            sys.exit(EXIT_PREEMPTED)


if __name__ == "__main__":
    main()
