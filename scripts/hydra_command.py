"""What the scripts share: settings composed by Hydra, errors in one line, nothing heavy imported before the work."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

PACKAGE = Path(*importlib.util.find_spec("dmc").submodule_search_locations)  # type: ignore
CONFIGS = next(path / "configs" for path in (PACKAGE.parent, PACKAGE) if (path / "configs" / "train.yaml").is_file())
SHOWS_STACK = os.environ.get("HYDRA_FULL_ERROR") == "1"


def command(name: str, on_devices: bool = False) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Decorate a script's main function, which takes the values of configs/NAME.yaml and of the command line."""

    def decorate(function: Callable[[Any], None]) -> Callable[[], None]:
        shows_stack = SHOWS_STACK

        @functools.wraps(function)  # also its module, by which a launcher pickles it; it uses no name of this module
        def task(settings: DictConfig) -> None:
            from dmc.config.command_line import run_task

            run_task(function, settings, on_devices, shows_stack)

        def main() -> None:
            sys.path.insert(0, str(Path.cwd()))  # folder of a user's own sources, policies and callbacks
            os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises what it would print in several lines
            try:
                hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=name)(task)()
            except Exception as error:
                if SHOWS_STACK:
                    raise
                exit_in_one_line(error)
            finally:
                os.environ["HYDRA_FULL_ERROR"] = str(int(SHOWS_STACK))

        return main

    return decorate


def exit_in_one_line(error: Exception) -> None:
    """End the process with what Hydra says of a setting, or as `dmc` ends it."""
    cause: Any = error.__cause__
    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        from dmc.config.command_line import errors_in_one_line

        with errors_in_one_line():
            raise error
    if getattr(cause, "parent_node", None) is not None and cause.key not in cause.parent_node:
        close = difflib.get_close_matches(str(cause.key), map(str, cause.parent_node), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(map(str, cause.parent_node))}"
        sys.exit(f"error: unknown setting {cause.full_key}: {hint}")
    sys.exit(f"error: {' '.join(str(error).split('Config search path')[0].split())}")


def console() -> None:
    """Run the script that a console command is named after: `dmc-train` is train.py."""
    folder, name = Path(__file__).parent, Path(sys.argv[0]).stem.removeprefix("dmc-").replace("-", "_")
    sys.path.insert(0, str(folder))
    runpy.run_path(str(folder / f"{name}.py"), run_name="__main__")
