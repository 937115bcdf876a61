"""The repository's configurations, composed as the scripts compose them."""

import copy
import functools
import re
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser

from dmc.config.command_line import plain_values
from dmc.training.config import run_config

CONFIGS = Path(__file__).parents[1] / "configs"
ALIKE = {"llama2_7b_cr4", "llama2_7b_cr8", "llama2_7b_branch", "llama2_7b_ramp"}
"""Experiments that have the shapes, ranks and batch of `llama2_7b_cr2`."""


def names(group):
    folder = CONFIGS / group
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def composed(*overrides):
    return run_config(plain_values(settings_of("train", *overrides)))


def settings_of(script, *overrides):
    """Compose a script's settings: each choice of groups once, in a copy of which Hydra sets the values."""
    keys = {word: re.split("[@=]", word.lstrip("+~"))[0] for word in overrides}
    chosen = [word for word, key in keys.items() if key.startswith("hydra") or (CONFIGS / key).is_dir()]
    settings = copy.deepcopy(choose(script, *chosen))
    values = OverridesParser.create().parse_overrides([word for word in overrides if word not in chosen])
    ConfigLoaderImpl._apply_overrides_to_config(values, settings)
    return settings


@functools.cache
def choose(script, *overrides):
    """Compose a script's settings, as Hydra does."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose(script, overrides=[*overrides])


def on_gpus():
    """Return the experiments that train on GPUs: their name, and the planner's device and its memory in GiB."""
    found = {}
    for name in names("experiment"):
        files = files_of(name) if "dmc train " in opening(name)[1] else []
        chosen = [entry for values in files for entry in values["defaults"] if "override /trainer" in entry]
        if chosen and not chosen[0]["override /trainer"].startswith("cpu"):
            planner = next(values["planner"] for values in files if "planner" in values)
            found[name] = {"device": planner["assumed_device"], "device_memory_gib": planner["assumed_memory_gib"]}
    return found


def files_of(name):
    """Read an experiment's file, and then those of the experiments that it begins with."""
    values = yaml.safe_load((CONFIGS / "experiment" / f"{name}.yaml").read_text())
    before = [entry for entry in values.get("defaults", []) if isinstance(entry, str)]
    return [values, *(file for other in before for file in files_of(other))]


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
