"""The commands, `dmc NAME`: those with settings have a `main` in `dmc/commands/NAME.py`, and `configs/NAME.yaml`."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One command."""

    does: str
    """What it does, in one line."""
    on_devices: bool = False
    """Whether it computes on GPUs where there are any."""
    has_settings: bool = True
    """Whether Hydra composes its settings; if not, `dmc_cli/NAME.py` has its `main`, which takes the arguments."""


COMMANDS = {
    "quickstart": Command("run the main job: learn gates, compare caches in equal bytes, draw", has_settings=False),
    "demo": Command("color what caches keep of a text, then ask about it"),
    "prepare_data": Command("tokenize a run's text ahead of it, on a machine without GPUs"),
    "train": Command("train a run: a retrofit, its control, or a base", on_devices=True),
    "collect": Command("put runs or a sweep into one table, and draw their curves"),
    "export": Command("write the last checkpoint of a run as a model's folder", on_devices=True),
    "generate": Command("continue a prompt from the compressed cache", on_devices=True),
    "serve": Command("serve models to clients of OpenAI's API, with a chat page", on_devices=True),
    "compare": Command("compare methods: policies, budgets and retrofits on tasks", on_devices=True),
    "audit": Command("compare, and fail where a claim is false or nothing was compressed", on_devices=True),
    "study": Command("train and compare the runs of a study over seeds"),
    "benchmark": Command("measure speed and memory of decoding", on_devices=True),
    "report": Command("turn folders of results into one page"),
    "plan": Command("tell how many requests a GPU holds at each compression ratio"),
    "fit_scorer": Command("fit KVpop's scorer to a stock model", on_devices=True),
    "import_gguf": Command("write a GGUF file as a Hugging Face folder"),
    "import_megatron": Command("write a checkpoint of Megatron-LM as a Hugging Face folder"),
    "export_megatron": Command("write a Llama as a checkpoint of Megatron-LM"),
    "gpu_check": Command("check a machine's GPUs, in a checkout", has_settings=False),
}
"""All commands, in the order of the work."""


def main() -> None:
    """Run the command that the command line names; without one print the table."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(overview())
    elif name in ("-sc", "--shell-completion"):
        complete(arguments)
    elif (known := name.replace("-", "_")) in COMMANDS:
        run(known, arguments)
    else:
        close = difflib.get_close_matches(name, map(spelled, COMMANDS), n=1)
        hint = f"did you mean {close[0]!r}?" if close else "`dmc` alone lists all commands"
        print(f"error: no command {name!r}: {hint}", file=sys.stderr)
        sys.exit(2)


def run(name: str, arguments: Sequence[str] | None = None) -> None:
    """Run a command.

    Args:
        name: a key of `COMMANDS`.
        arguments: its settings; None: those of this process's command line.
    """
    command, arguments = COMMANDS[name], sys.argv[1:] if arguments is None else arguments
    if command.has_settings:
        try:
            from dmc_cli.hydra_command import run_with_settings
        except ModuleNotFoundError as error:
            sys.exit(f"error: commands need more packages ({error}): pip install 'dmc-retrofit[train]'")
        run_with_settings(name, arguments, command.on_devices)
    else:
        importlib.import_module(f"dmc_cli.{name}").main(arguments)


def spelled(name: str) -> str:
    """Return a command's name as it is written after `dmc`."""
    return name.replace("_", "-")


def overview() -> str:
    """Return the table as text."""
    width = max(map(len, COMMANDS))
    lines = [f"  {spelled(name):<{width}}  {command.does}" for name, command in COMMANDS.items()]
    about = "Settings are NAME=VALUE, of configs/COMMAND.yaml: dmc COMMAND --help shows them."
    return "\n".join(["dmc COMMAND [SETTING ...]", "", *lines, "", about])


def complete(arguments: Sequence[str]) -> None:
    """Complete a command line for a shell, which gives it as COMP_LINE: the command's name, or by Hydra its settings.

    Args:
        arguments: Hydra's: `install=bash`, `query=bash`, ...
    """
    line = os.environ.get("COMP_LINE", "")
    program, name, rest = [*line.split(" ", 2), "", "", ""][:3]
    if not arguments or not arguments[0].startswith("query="):
        run("train", ["-sc", *arguments])  # the shell's function is the same for all
    elif line.count(" ") < 2:
        print(*(spelled(known) for known in COMMANDS if spelled(known).startswith(name)), sep="\n")
    elif (known := name.replace("-", "_")) in COMMANDS and COMMANDS[known].has_settings:
        os.environ["COMP_LINE"] = f"{program} {rest}"
        run(known, ["-sc", *arguments])
