"""What every script does: settings as people write them turned into what Hydra reads, and a process set up."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
import torch

LISTS = ("tasks", "policies", "budgets", "folders", "batch_sizes", "ratios", "seeds", "only")
"""Settings that are lists in every script that has them."""
CHOOSING = ("train", "prepare_data")
"""Scripts whose `model` is a file of `configs/model`; in the others it holds path, dtype and revision."""


def script(name: str) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Make a script's main function, which takes composed settings, read the command line.

    Args:
        name: of its file in `configs/`, which lies beside the script's folder.
    """

    def decorate(function: Callable[[Any], None]) -> Callable[[], None]:
        configs = Path(function.__code__.co_filename).resolve().parent.parent / "configs"
        run = hydra.main(version_base="1.3", config_path="../configs", config_name=name)(function)

        @functools.wraps(function)
        def main() -> None:
            flush_denormals()
            sys.argv[1:] = plain_settings(name, sys.argv[1:], configs)
            run()

        return main

    return decorate


def flush_denormals() -> None:
    """Count numbers below 1e-38 as 0 in this process, for a CPU computes with them up to 15 times as slowly.

    Attention to what a sure gate has closed is full of them. Call it before the first product: a thread keeps what was
    set when it started.
    """
    torch.set_flush_denormal(True)


def plain_settings(name: str, arguments: Sequence[str], configs: Path) -> list[str]:
    """Write a command line as Hydra reads it.

    `model=DIR` becomes `model.path=DIR`, of which a name in `configs/model` stays the choice of that file where the
    script has one; a list may stand without brackets. Of a sweep each value is one of these.

    Args:
        name: of the script's file in `configs`.
        arguments: settings and Hydra's own options.
        configs: folder of all settings.
    """
    sweeps = bool({"-m", "--multirun"} & set(arguments))
    found: list[str] = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key == "model" and value[:1] not in ("", "{") and not (name in CHOOSING and _is_choice(value, configs)):
            found += ["model=pretrained"] * (name in CHOOSING) + [f"model.path={value}"]
        elif key in LISTS and value[:1] not in ("", "["):
            found.append(f"{key}={_listed(value, sweeps)}")
        else:
            found.append(argument)
    return found


def _is_choice(value: str, configs: Path) -> bool:
    """Tell names of `configs/model`, and what may be meant as one, from folders and hub names of models."""
    files = configs / "model"
    names = value.split(",")
    return all("/" not in each and ((files / f"{each}.yaml").is_file() or not Path(each).is_dir()) for each in names)


def _listed(value: str, sweeps: bool) -> str:
    """Write `a,b` as `[a,b]`; in a sweep, where it is one value after the other, as `[a],[b]`."""
    if not sweeps:
        return f"[{value}]"
    return value if set(value) & set("[{(") else ",".join(f"[{each}]" for each in value.split(","))
