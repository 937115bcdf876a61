"""The repository's configurations, composed as the scripts compose them."""

import copy
from pathlib import Path

import yaml
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
    """Return the experiments that set for which GPUs they are planned: their name, and what the plan then is for.

    That is the overrides of the devices, and the planner's device and its memory in GiB.
    """
    found = {}
    for name in names("experiment"):
        values = yaml.safe_load((CONFIGS / "experiment" / f"{name}.yaml").read_text())
        if (planner := values.get("planner")) is not None:
            devices = [] if {"override /trainer": "gpu"} in values["defaults"] else ["trainer.devices=8"]
            assumed = {"device": planner["assumed_device"], "device_memory_gib": planner["assumed_memory_gib"]}
            found[name] = devices, assumed
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
