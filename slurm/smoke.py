"""Compare what a smoke run recorded with its plan, and say whether it went well: python slurm/smoke.py FOLDER.

FOLDER is the run's, and holds its plan as `plan.json`. After a run that went well its weights are removed.
"""

from __future__ import annotations

import csv
import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from dmc.training.callbacks.stop_once import SAVED_NAME
from dmc.training.checkpoints import FOLDER_NAME, step_name
from dmc.training.model_folder import is_final
from dmc.training.record import STARTS_NAME, read_config
from dmc.training.stages import Plan

GIB = 2**30
Metrics = list[dict[int, dict[str, float]]]


def read_metrics(folder: Path) -> Metrics:
    """Read what each start logged, by step and name."""
    starts = []
    for number in range(len([*folder.glob("logs/version_*/metrics.csv")])):
        steps: dict[int, dict[str, float]] = {}
        with (folder / f"logs/version_{number}/metrics.csv").open() as file:
            for row in csv.DictReader(file):
                values = {name: float(value) for name, value in row.items() if value and name.startswith("train/")}
                steps.setdefault(int(row["step"]), {}).update(values)
        starts.append({step: values for step, values in steps.items() if "train/loss" in values})
    return starts


def failures(folder: Path, metrics: Metrics, total_steps: int, saved: dict[str, Any]) -> Iterator[str]:
    """Tell what a run did not do that it should have."""
    first = [json.loads(line)["step"] for line in (folder / STARTS_NAME).read_text().splitlines()]
    stop = saved["step"]
    if first != [0, stop]:
        yield f"its starts began at steps {first}, expected [0, {stop}]"
    expected = [[*range(stop)], [*range(stop, total_steps)]]
    if (logged := [sorted(start) for start in metrics]) != expected:
        yield f"its starts logged steps {logged}, expected 0 to {stop - 1} and {stop} to {total_steps - 1}"
    for step, values in ((step, values) for start in metrics for step, values in start.items()):
        if not math.isfinite(values["train/loss"]) or values.get("train/skipped_steps", 0):
            yield f"step {step} was skipped: its loss is {values['train/loss']}"
    if not is_final(folder / "final"):
        yield f"{folder / 'final'} is no complete model"


def table(folder: Path, plan: dict[str, Any], metrics: Metrics, saved: dict[str, Any]) -> list[str]:
    """Return the lines of a table of measured and planned figures."""
    steps = [values for start in metrics for values in start.values()]

    def typical(name: str) -> float | None:
        """Return the median over steps; a start's first one is not timed."""
        found = [values[name] for values in steps if name in values]
        return median(found) if found else None

    def written(value: float | None, text: str, otherwise: str = "not known") -> str:
        return otherwise if value is None else text.format(value)

    seconds, device, memory = typical("train/seconds_per_step"), plan["device"], plan["memory"]
    peak = max(values.get("train/peak_memory_gib", 0.0) for values in steps)
    tensors = (memory["total"] - memory.get("context, fragmentation", 0)) / GIB  # what PyTorch's allocator counts too
    of_plan = f"{tensors:.2f} GiB of tensors"
    planned_checkpoint = plan["disk"]["checkpoint"]
    checkpoint = folder / FOLDER_NAME / step_name(saved["step"])
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    hours = None if seconds is None else seconds * plan["steps"] * plan["num_devices"] / 3600
    loss = [step["train/loss"] for step in (steps[0], steps[-1])]
    rows = [
        ("tokens per second", written(typical("train/tokens_per_second"), "{:,.0f}"), ""),
        ("seconds per step", written(seconds, "{:.3f}"), ""),
        ("of them, waiting for data", written(typical("train/data_seconds_per_step"), "{:.3f}"), ""),
        ("MFU", written(typical("train/mfu"), "{:.1%}", f"peak of {device['name']} not known"),
         f"{plan['assumed_utilization']:.0%} assumed"),
        (f"peak of a rank, {'allocated' if device['is_gpu'] else 'resident with Python and its libraries'}",
         f"{peak:.2f} GiB" + (f" ({peak / tensors - 1:+.0%})" if device["is_gpu"] else ""), of_plan),
        ("checkpoint", f"{size / GIB:.2f} GiB in {saved['seconds']:.1f} s", f"{planned_checkpoint / GIB:.2f} GiB"),
        (f"the whole run, {plan['steps']:,} steps, in device-hours", written(hours, "{:,.1f}"),
         written(plan["assumed_gpu_hours"], "{:,.1f} assumed")),
        ("loss at the first and last step", f"{loss[0]:.3f}, {loss[1]:.3f}", ""),
    ]  # fmt: skip
    return ["| what | measured | plan |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]


def main(folder: Path) -> None:
    """Print the table of a run; exit with what went wrong, if something did."""
    text = (folder / "plan.json").read_text()
    plan = json.loads(text[text.index("{\n") :])  # warnings come before it
    config = read_config(folder)
    total_steps = Plan(config.training, config.target_ratio, config.compression).total_steps
    saved = json.loads((folder / SAVED_NAME).read_text())
    metrics = read_metrics(folder)
    print("\n".join(table(folder, plan, metrics, saved)))
    if failed := "; ".join(failures(folder, metrics, total_steps, saved)):
        sys.exit(failed)
    for weights in (folder / FOLDER_NAME, folder / "final"):
        shutil.rmtree(weights)
    ranks = f"{plan['num_devices']} x {plan['device']['name']}, {plan['strategy']}"
    print(f"smoke: ok: {total_steps} steps on {ranks}, stopped after step {saved['step']} and resumed there: {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
