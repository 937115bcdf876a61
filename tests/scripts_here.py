"""Scripts run in the tests' own process, which has imported already what takes them seconds."""

import logging
import runpy
import sys
from pathlib import Path

import torch
from hydra.core.global_hydra import GlobalHydra

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def run_script(name, *arguments):
    """Run a script as a command line does and return what it exits with, empty where all went well.

    Args:
        name: of a file in `scripts/`.
        arguments: of the command line.
    """
    root = logging.getLogger()
    argv, handlers, level, path = sys.argv, root.handlers[:], root.level, sys.path[:]
    sys.argv = [str(SCRIPTS / name), *arguments]
    sys.path.insert(0, str(SCRIPTS))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        return str(stop.code or "")
    finally:
        sys.argv, root.handlers[:], sys.path[:] = argv, handlers, path
        root.setLevel(level)
        torch.set_flush_denormal(False)  # a script's process is its own
        GlobalHydra.instance().clear()
    return ""
