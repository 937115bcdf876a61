"""Names that earlier versions gave to tasks, settings and fields of results, which are still read with a warning."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

TASKS = {"inside": "cache_analysis", "haystack": "needle", "key_value_text": "key_value"}
"""Tasks of `compare.py`."""
SETTINGS = {
    "training.measured_start": "training.sensitivity_init",
    "training.regressed_start": "training.regression_init",
    "planner.utilisation": "planner.utilization",
}
"""Settings of a run, SECTION.NAME."""
FIELDS = {"own_gates": "learned", "far_repeat_loss": "long_range_repeat_loss"}
"""Fields and metrics of rows in `cells.jsonl`."""


def present_name(name: str, names: Mapping[str, str]) -> str:
    """Return the present name of something, or of what it is a part of: `a.b.c` for `a.b`.

    Args:
        name: a name of this version or an earlier one; the latter is warned of.
        names: present names by earlier ones.
    """
    for earlier, present in names.items():
        if name == earlier or name.startswith(f"{earlier}."):
            warn_of(earlier, names)
            return present + name[len(earlier) :]
    return name


def with_present_settings(values: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Return a run's nested settings under their present names; an earlier name that is not null is warned of.

    Args:
        values: settings by section, as YAML or `run.json` gives them.
        where: file that they are from, for the warning.
    """
    found = dict(values)
    for earlier, present in SETTINGS.items():
        section, _, name = earlier.partition(".")
        own = found.get(section)
        if isinstance(own, dict) and name in own:
            value = own[name]
            if value is not None:
                warn_of(earlier, SETTINGS, where)
            kept = {key: each for key, each in own.items() if key != name}
            found[section] = kept | {present.partition(".")[2]: value}
    return found


def refuse_earlier_settings(values: dict[str, Any]) -> None:
    """Refuse earlier names in composed settings: there they stand beside the present ones, and either may be newer.

    Args:
        values: settings by section, as Hydra composes them of files and command line.
    Raises:
        ValueError: one of them has an earlier version's name.
    """
    for earlier, present in SETTINGS.items():
        section, _, name = earlier.partition(".")
        own = values.get(section)
        if isinstance(own, dict) and name in own:
            raise ValueError(f"{earlier} is now called {present}: rename it in your YAML file")


def warn_of(earlier: str, names: Mapping[str, str], where: str = "") -> None:
    """Say that an earlier name was read: of a setting, or in a file."""
    logger.warning("%s%s is an earlier version's name and is read as %s", where, earlier, names[earlier])
