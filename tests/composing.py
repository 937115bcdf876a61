"""The repository's configurations, composed as the scripts compose them."""

import copy
import re
from pathlib import Path

from hydra import compose, initialize_config_dir

from dmc.config.command_line import plain_values
from dmc.training.config import run_config

CONFIGS = Path(__file__).parents[1] / "configs"
ALIKE = {"llama2_7b_cr4", "llama2_7b_cr8", "llama2_7b_branch", "llama2_7b_ramp"}
"""Experiments that have the shapes, ranks and batch of `llama2_7b_cr2`."""


def names(group):
    folder = CONFIGS / group
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def composed(*overrides):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return run_config(plain_values(compose("train", overrides=[*overrides])))


def on_gpus():
    """Return the experiments that say for which GPUs they are planned: their name, and what the plan then assumes.

    That is the overrides of the devices, and the planner's device and its memory in GiB.
    """
    found = {}
    for name in names("experiment"):
        header = re.search(r"As planned for (.*) with (\d+) GB;", (CONFIGS / "experiment" / f"{name}.yaml").read_text())
        if header is not None:
            machine, memory = header[1], float(header[2])
            devices = [] if machine.startswith("one RTX") else ["trainer.devices=8"]
            found[name] = devices, {"device": re.search("H100|RTX 4090", machine)[0], "device_memory_gib": memory}
    return found


def changed(values, changes):
    """Copy nested settings, some of them changed by their dotted names."""
    values = copy.deepcopy(values)
    for path, value in changes.items():
        *folders, last = path.split(".")
        place = values
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
    return values


def opening(name):
    return (CONFIGS / "experiment" / f"{name}.yaml").read_text().splitlines()[:2]
