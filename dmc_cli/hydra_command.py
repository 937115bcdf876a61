"""What the commands share: settings composed by Hydra, errors in one line, nothing heavy imported before the work."""

from __future__ import annotations

import atexit
import difflib
import gc
import importlib.util
import os
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

PACKAGE = Path(*importlib.util.find_spec("dmc").submodule_search_locations)  # type: ignore
CONFIGS: Path = runpy.run_path(str(PACKAGE / "config" / "folder.py"))["CONFIGS"]  # without `import dmc`, and torch
QUOTES = """; quote a list or mapping for the shell, 'models={base: DIR}', and text twice, 'prompt="f(x), y"'"""
ADVICE = r" (Config search path|See https://hydra.cc|To append to your default list).*?(?=; quote|$)"
"""What Hydra adds to its errors: folders, a link, and how to add a group that a command does not know."""
DASHED = re.compile(r"--(?!cfg|config-|info|package|experimental)[\w.-]+=")
"""A setting that is written as a flag; these are Hydra's flags that take a value."""
SHOWS_STACK = os.environ.get("HYDRA_FULL_ERROR") == "1"


def run_with_settings(name: str, arguments: Sequence[str], on_devices: bool = False) -> None:
    """Run a command with the values of configs/NAME.yaml and of the command line.

    Args:
        name: of the command.
        arguments: Hydra's options and overrides.
        on_devices: whether it computes on GPUs where there are any.
    """
    given, shows_stack = [*sys.argv], SHOWS_STACK

    def task(settings: DictConfig) -> None:  # a launcher pickles it, without this module
        from dmc.config.command_line import run_task

        sys.argv[:] = given  # by which Lightning starts further ranks, and a result tells its command
        run_task(name, settings, on_devices, shows_stack)

    task.__module__ = f"dmc.commands.{name}"  # from which Hydra takes the job's name
    if dashed := next(filter(DASHED.match, arguments), None):
        sys.exit(f"error: {dashed}: settings are NAME=VALUE, without dashes; see --help")
    atexit.register(gc.freeze)  # else the interpreter's end looks for garbage in all that was imported: seconds
    sys.path.insert(0, str(Path.cwd()))  # folder of a user's own sources, policies and callbacks
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises what it would print in several lines
    sys.argv[1:] = arguments  # Hydra reads them there
    try:
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=name)(task)()
    except Exception as error:
        if SHOWS_STACK:
            raise
        exit_in_one_line(error)
    finally:
        sys.argv[:] = given
        os.environ["HYDRA_FULL_ERROR"] = str(int(SHOWS_STACK))


def exit_in_one_line(error: Exception) -> None:
    """End the process with what Hydra says of a setting, or as `dmc` ends it."""
    message = " ".join(str(error).split())
    if "Got NoneType" in message:  # from compression=null
        message = f"{', '.join(word for word in sys.argv if word.endswith('=null'))}: ~NAME leaves a group out"
    elif not isinstance(error, (HydraException, OmegaConfBaseException)):
        from dmc.config.command_line import errors_in_one_line

        with errors_in_one_line():
            raise error
    cause: Any = error.__cause__
    if isinstance(getattr(cause, "parent_node", None), DictConfig) and cause.key not in cause.parent_node:
        message = (
            f"unknown setting {cause.full_key}: {_hint(str(cause.key), OmegaConf.to_container(cause.parent_node))}"
        )
    elif "override_grammar" in message:
        message += QUOTES
    sys.exit(f"error: {re.sub(ADVICE, '', message)}")


def _hint(name: str, values: Any) -> str:
    """Return what may have been meant: a setting of this name further down, the closest one here, or any one here."""
    below = [path for path in _paths(values) if path.endswith(f".{name}")]
    if close := min(below, key=lambda path: path.count("."), default=None):
        return f"did you mean {close!r}?"
    if found := difflib.get_close_matches(name, map(str, values), n=1):
        return f"did you mean {found[0]!r}?"
    known = ", ".join(str(key) for key in values if key != "hydra")
    if known:
        return f"expected one of {known}"
    return "the setting above it is a single value, or has no entries yet: + before the name adds one"


def _paths(values: Any) -> list[str]:
    """List the names of all settings, such as `stages.retrofit.length`."""
    items = values.items() if isinstance(values, dict) else ()
    return [path for key, below in items for path in (str(key), *(f"{key}.{path}" for path in _paths(below)))]
