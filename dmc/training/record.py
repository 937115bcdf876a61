"""Record of a run: its settings, and the environment of each of its starts."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dmc.config import build_config
from dmc.files import append_line, flattened, read_mapping, written_whole
from dmc.results.provenance import installed_packages, provenance, slurm_job
from dmc.training.checkpoints import read_header
from dmc.training.config import RunConfig
from dmc.training.stages import Plan

CONFIG_NAME = "run.json"
"""Configuration and provenance, in a run's output folder."""
STARTS_NAME = "starts.jsonl"
"""File with one line for each start: its first step, time, commit, versions, Slurm job."""
PACKAGES_NAME = "packages.txt"
"""File with every package installed at the last start."""
OWN_SOURCES = (
    *("ChainSource", "ListSource", "MegatronSource", "PackageSource", "ProseSource"),
    *("StandardLibrarySource", "TextSource"),
)
"""Classes of `dmc.data` that an untrusted record may name."""
SAVED = ("checkpoints", "milestones", "final", "snapshots")
"""Folders of a run's saved models and checkpoints."""
MUTABLE_ON_RESUME = (
    "output_dir", "use_previous_checkpoint", "logger", "callbacks", "data.cache_folder", "data.num_workers",
    "data.tokenize_num_proc", "training.activation_checkpointing", "training.checkpoint_every_steps",
    "training.log_every_steps",
    "training.max_nonfinite_steps", "training.micro_batch_size", "training.milestones", "training.push_to_hub",
    "trainer.accelerator", "trainer.compile", "trainer.devices", "trainer.num_nodes",
    "trainer.accumulate_locally", "trainer.lightning", "trainer.offload", "trainer.peak_teraflops",
    "trainer.shard_size", "trainer.strategy", "trainer.tensor_parallel_size", "trainer.context_parallel_size",
)  # fmt: skip
"""Settings that may change between the starts of a run, because they do not change the results."""
MEASURED = (
    "data.calibration", "data.test", "training.calibrate", "training.calibration_sequences",
    "training.export_dtype", "training.validate_every_steps", "training.validation_sequences",
)  # fmt: skip
"""Settings of measurement and export, not of training: a run may resume with others, which are recorded."""
OF_A_BRANCH = (
    "compression.target_ratio", "training.branch_from", "training.stages", "training.delays",
    "training.snapshot_ratios",
)  # fmt: skip
"""Settings that may differ in a branch; their values at the shared steps must be the same."""


def check_same_run(folder: Path, config: RunConfig) -> None:
    """Check that the output folder holds no other run; one that has saved nothing yet may be corrected.

    Raises:
        ValueError: the folder holds a run with other settings, or a damaged record.
    """
    if not ((folder / CONFIG_NAME).is_file() and _has_saved(folder)):
        return
    if changed := _changed(_plain(read_config(folder)), _plain(config)):
        raise ValueError(
            f"{folder} holds a run with other settings ({changed}): give what it began with, or choose another "
            "output_dir"
        )


def check_same_text(folder: Path, text: dict[str, str], base: Path | None = None) -> None:
    """Check that a run goes on, or is exported, with the text and the weights that it began with.

    Args:
        folder: folder of the run.
        text: hash of each source, and of the model and the teacher.
        base: run that this one branches off; None: no branch.
    Raises:
        ValueError: one of them has changed.
    """
    record = (base or folder) / CONFIG_NAME
    if not record.is_file() or not (base or _has_saved(folder)):
        return
    known = _recorded(record).get("text", {})
    if changed := [name for name, digest in text.items() if known.get(name, digest) != digest]:
        what = "text" if changed[0].startswith("data.") else "weights"
        raise ValueError(
            f"{changed[0]} has changed since the run in {base or folder} began, which would go on with other {what}: "
            "put back what it was, or begin another run (output_dir)"
        )


def check_branch(config: RunConfig, plan: Plan) -> None:
    """Check that the run would have taken the same steps up to the milestone.

    Raises:
        FileNotFoundError: there is no milestone, or no run around it.
        ValueError: the two differ before it, or the milestone comes after the run's last step.
    """
    milestone = Path(str(config.training.branch_from))
    steps = read_header(milestone).global_step
    source = milestone.parent.parent
    known = read_config(source)
    if changed := _changed(_plain(known), _plain(config), OF_A_BRANCH):
        raise ValueError(
            f"training.branch_from={milestone}: its run has other settings ({changed}); give this one the same: a "
            "branch goes on as that run would have"
        )
    if steps >= plan.total_steps:
        raise ValueError(
            f"training.branch_from={milestone} lies after step {steps}, this run ends after {plan.total_steps}: take "
            "an earlier milestone, or a higher compression.target_ratio"
        )
    theirs = Plan(known.training, known.target_ratio, known.compression)
    for step in range(steps):
        if theirs.at(step) != plan.at(step):
            raise ValueError(
                f"training.branch_from={milestone} lies after step {steps}, and step {step} of its run was another: "
                f"{theirs.at(step)} there, {plan.at(step)} here; give training.stages as there, and to a ramp by steps "
                f"training.stages.retrofit.ramp_to={known.target_ratio:g} in both; compression.target_ratio is the "
                "milestone's"
            )


def _changed(known: dict[str, Any], values: dict[str, Any], apart_from: tuple[str, ...] = ()) -> str:
    names = [name for name in {*known, *values} if not name.startswith((*MUTABLE_ON_RESUME, *MEASURED, *apart_from))]
    changed = sorted(name for name in names if known.get(name) != values.get(name))
    return ", ".join(f"{name}: {known.get(name)!r} then, {values.get(name)!r} now" for name in changed[:5])


def record_run(folder: Path, config: RunConfig, text: dict[str, str] | None = None) -> None:
    """Record configuration and text of a new run; for a resumed one, update measurement and the place of the text."""
    folder.mkdir(parents=True, exist_ok=True)
    record, values = folder / CONFIG_NAME, dataclasses.asdict(config)
    content = {"config": values, **provenance()}
    if record.is_file() and _has_saved(folder):
        content = _recorded(record)
        for section, _, name in (key.partition(".") for key in (*MEASURED, "data.cache_folder")):
            content["config"][section][name] = values[section][name]
    with written_whole(record) as partial:
        partial.write_text(json.dumps(content | ({} if text is None else {"text": text}), indent=2) + "\n")


def _has_saved(folder: Path) -> bool:
    """Return whether a run has left a complete checkpoint or model."""
    left = [path.name for place in map(folder.joinpath, SAVED) if place.is_dir() for path in place.iterdir()]
    return any(not name.startswith(".") and not name.endswith(".partial") for name in left)


def _recorded(record: Path) -> dict[str, Any]:
    """Read a run's record."""
    content = read_mapping(record)
    if not isinstance(content.get("config"), dict):
        raise ValueError(f"{record} is damaged: it has no mapping `config`")
    return content


def read_config(folder: Path) -> RunConfig:
    """Read the configuration of the run in an output folder.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: its record is damaged, or has settings that are unknown.
    """
    record = folder / CONFIG_NAME
    if not record.is_file():
        raise FileNotFoundError(f"{record} does not exist: run= is the output folder of a training run")
    try:
        return build_config(RunConfig, _recorded(record)["config"])
    except ValueError as error:
        raise ValueError(f"{record}: {error}") from error


def read_foreign_config(folder: Path, trust_run: bool = False) -> RunConfig:
    """Read the configuration of an untrusted run.

    Args:
        folder: the run's output folder.
        trust_run: let its record name any class or function, which is then imported and called.
    Raises:
        FileNotFoundError: there is no run.
        ValueError: its record names a target that is not a source of `dmc.data`, or refers to this environment.
    """
    config = read_config(folder)
    if not trust_run and "${" in json.dumps(dataclasses.asdict(config.data)):
        raise ValueError(f"{folder / CONFIG_NAME} has ${{...}} in its data, which Hydra would resolve on this machine")
    for path in [] if trust_run else _targets(dataclasses.asdict(config.data)):
        if not (path.startswith("dmc.data.") and path.rpartition(".")[2] in OWN_SOURCES):
            raise ValueError(
                f"{folder / CONFIG_NAME} names {path}, which is no source of dmc.data: reading its text would run "
                "that; pass trust_run=true if you know who made the folder"
            )
    return config


def _targets(values: Any) -> Iterator[str]:
    """Find every `_target_` in nested values."""
    if isinstance(values, dict):
        if "_target_" in values:
            yield str(values["_target_"])
        values = list(values.values())
    for value in values if isinstance(values, (list, tuple)) else ():
        yield from _targets(value)


def record_start(folder: Path, step: int) -> None:
    """Record a start of the run after `step` optimizer steps."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    line = json.dumps({"step": step, "time": now, **provenance(), "slurm": slurm_job()})
    append_line(folder / STARTS_NAME, line)
    (folder / PACKAGES_NAME).write_text("\n".join(installed_packages()) + "\n")


def _plain(config: RunConfig) -> dict[str, Any]:
    values = flattened(json.loads(json.dumps(dataclasses.asdict(config))))
    return values | {"training.stages": [*config.training.stages], "data.train": [*config.data.train]}  # their orders
