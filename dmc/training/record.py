"""The record a run keeps of itself: its settings, and where and with what each of its parts ran."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from pathlib import Path
from typing import Any

from dmc.config import RunConfig, build_config
from dmc.provenance import installed_packages, provenance, slurm_job

CONFIG_NAME = "run.json"
"""Configuration and provenance, in a run's output folder."""
STARTS_NAME = "starts.jsonl"
"""One line for each start: the step it goes on from, time, commit, versions, Slurm job."""
PACKAGES_NAME = "packages.txt"
"""Every package installed at the last start."""
PLACES = (
    "output_dir", "use_previous_checkpoint", "logger", "data.cache_folder", "data.num_workers", "data.num_processes",
    "model.architecture",
    "training.log_every_steps", "training.micro_batch_size", "training.max_nonfinite_steps",
    "training.hang_timeout_minutes", "trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.offload",
    "trainer.peak_teraflops", "trainer.strategy", "trainer.tensor_parallel_size",
)  # fmt: skip
"""Settings that may change between the parts of one run: none of them changes what is computed."""


def is_rank_zero() -> bool:
    """Tell whether this is the first of the processes launched together, before they can talk to each other."""
    if "RANK" in os.environ:  # torchrun numbers its processes anew, also inside srun
        return os.environ["RANK"] == "0"
    return all(os.environ.get(name, "0") == "0" for name in ("NODE_RANK", "LOCAL_RANK", "SLURM_PROCID"))


def claim(folder: Path, config: RunConfig) -> None:
    """Record the configuration in the output folder, or check that it is the same run that goes on there.

    Raises:
        ValueError: the folder holds a run with other settings.
    """
    record, values = folder / CONFIG_NAME, _plain(config)
    if record.is_file():
        try:
            known = _plain(read_config(folder))  # settings that did not exist yet then had their defaults
            compared = set(known) | set(values)
        except ValueError:  # a setting this version does not know: told with the others that were recorded
            known = _flat(json.loads(record.read_text())["config"])
            compared = set(known)
        differing = {key for key in compared if known.get(key) != values.get(key)}
        changed = sorted(key for key in differing if not key.startswith(PLACES))
        if changed:
            shown = ", ".join(f"{key}: {known.get(key)!r} then, {values.get(key)!r} now" for key in changed[:5])
            raise ValueError(
                f"{folder} holds a run with other settings ({shown}): choose another output_dir, or delete the folder"
            )
    elif is_rank_zero():
        folder.mkdir(parents=True, exist_ok=True)
        content = {"config": dataclasses.asdict(config), **provenance()}
        partial = record.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=2) + "\n")
        partial.replace(record)


def read_config(folder: Path) -> RunConfig:
    """Read the configuration of the run in an output folder.

    Raises:
        FileNotFoundError: there is no run.
    """
    record = folder / CONFIG_NAME
    if not record.is_file():
        raise FileNotFoundError(f"{record} does not exist: run= is the output folder of a training run")
    return build_config(RunConfig, json.loads(record.read_text())["config"])


def record_start(folder: Path, step: int) -> None:
    """Write down a start of the run after `step` optimizer steps."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    line = json.dumps({"step": step, "time": now, **provenance(), "slurm": slurm_job()})
    with (folder / STARTS_NAME).open("a") as file:
        file.write(line + "\n")
    (folder / PACKAGES_NAME).write_text("\n".join(installed_packages()) + "\n")


def _plain(config: RunConfig) -> dict[str, Any]:
    return _flat(json.loads(json.dumps(dataclasses.asdict(config))))


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
