"""Gates of SmolLM2-135M alone, to CR 8 with a snapshot at CR 4: trained until time is up, evaluated, written out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from gpu_parts.place import Figure, Place, Rows, row
from gpu_parts.runs import STOPPED, last_line, logged, metrics_of, model_of, ran, script, text_settings

RAMP, SOLIDIFY, RAMP_SECONDS = 420, 120, 345
"""Steps of 32,768 tokens that an H100 takes in so many seconds, at 72,000 tokens a second; with less time, fewer."""
EXPORT_SECONDS = 30
KEPT = "dmc_gates.safetensors", "config.json", "retrofit.json", "README.md"
"""Files of a folder of gates that are handed out: 0.4 MB."""


def figures(place: Place) -> Iterator[Figure]:
    """Gates alone of SmolLM2-135M to CR 8, with a snapshot at CR 4: trained, evaluated, written out (0.4 MB each)"""
    folders: dict[str, Path] = {}
    yield Figure("training", partial(_train, place, folders))
    yield Figure("evaluation", partial(_evaluate, place, folders))


def _settings(place: Place, model: str, run: Path, seconds: float) -> list[str]:
    steps = [max(2, round(number * min(1, seconds / RAMP_SECONDS))) for number in (RAMP, SOLIDIFY)]
    ramp, solidify = (4, 2) if place.is_tiny else steps
    every = place.size(100, 3)
    sizes = {"sequence_length": (2048, 128), "batch_size": (16, 4), "micro_batch_size": (16, 2)}
    return [
        f"model={model}", *text_settings(place), "training=retrofit_measured", "training.gates_only=true",
        "compression=dmc_hidden", f"compression.delay={place.size(64, 8)}", "compression.target_ratio=8",
        *(f"training.{name}={pair[place.is_tiny]}" for name, pair in sizes.items()),
        f"training.stages.retrofit={{length: {ramp} steps, ramp_to: 8.0}}",
        f"training.stages.solidify.length={solidify} steps", "training.snapshot_ratios=[4.0]",
        "training.distillation.weight=1.0", "training.learning_rate=1e-3", "training.activation_checkpointing=false",
        f"training.sensitivity_init.sequences={place.size(16, 2)}", f"training.validate_every_steps={every}",
        f"training.calibration_sequences={place.size(16, 2)}", f"training.validation_sequences={place.size(32, 2)}",
        "training.checkpoint_every_steps=10000", f"training.log_every_steps={place.size(10, 1)}",
        f"trainer={'cpu' if place.device == 'cpu' else 'gpu'}", f"output_dir={run}",
    ]  # fmt: skip


def _train(place: Place, folders: dict[str, Path]) -> Rows:
    """Train until the time that evaluation needs, stop as before the end of a job, and export what there is."""
    model, what = model_of(place)
    folders["base"] = Path(model)
    root, log = place.output.resolve() / "train", place.output.resolve() / "train.train.log"
    run = root / "run"
    shutil.rmtree(run, ignore_errors=True)
    stop_after = place.seconds_left - EXPORT_SECONDS - evaluation_seconds(place)
    settings = _settings(place, model, run, stop_after)
    code = script("train", settings, log, place.seconds_left, stop_after=stop_after)
    done = run / "final"
    targets = logged(run, "train/target_ratio")
    if code == STOPPED and targets:
        done = root / "stopped"
        ratio = max(1.0, [*targets.values()][-1])
        export = [f"run={run}", f"output={done}", f"target_ratio={ratio:g}", "overwrite=true", "trust_run=true"]
        ran("export", export, log, place.seconds_left)
        yield row("stopped for want of time", ratio, "CR", f"after {max(targets) + 1} steps; it is exported")
    elif code:
        yield row("training", code, "exit code", last_line(log), holds=False)
    yield from _of_run(run, what)
    for folder in (run / "snapshots" / "cr4", done):
        if (folder / KEPT[0]).exists():
            name = f"cr{folder.name.removeprefix('cr')}" if folder.name.startswith("cr") else "cr8"
            folders["stopped" if folder.name == "stopped" else name] = folder
    for name, folder in folders.items():
        if name != "base":
            yield from _hand_out(place, name, folder)


def evaluation_seconds(place: Place) -> float:
    """Return the time that is kept for the evaluation: 150 seconds, of a short part a third."""
    return min(150.0, place.seconds / 3)


def _of_run(run: Path, what: str) -> Rows:
    """Yield what the run has logged last."""
    units = {
        "tokens_per_second": "tokens/s", "mfu": "of the peak", "peak_memory_gib": "GiB", "loss": "nats",
        "distillation_loss": "nats", "achieved_ratio": "CR", "target_ratio": "CR",
    }  # fmt: skip
    for name, unit in units.items():
        if values := logged(run, f"train/{name}"):
            yield row(f"{what}, gates alone: {name}", [*values.values()][-1], unit, f"at step {max(values) + 1}")
    for step, loss in logged(run, "validation/loss").items():
        yield row("validation loss on the way", loss, "nats", f"at step {step + 1}")


def _hand_out(place: Place, name: str, folder: Path) -> Rows:
    """Copy the gates to where the figures are; yield what was measured when they were exported."""
    kept = place.output / "gates" / name
    kept.mkdir(parents=True, exist_ok=True)
    for file in KEPT:
        if (folder / file).exists():
            shutil.copy(folder / file, kept / file)
    size = sum(path.stat().st_size for path in kept.iterdir()) / 1e6
    yield row(f"{name}: size of its folder of gates", size, "MB", str(kept))
    for metric, value in metrics_of(folder).items():
        if isinstance(value, int | float):
            yield row(f"{name}: {metric}", value, "", "thresholded, when it was exported")


def _evaluate(place: Place, folders: dict[str, Path]) -> Rows:
    """Compare held-out text, needle and pass key: the base, its gates, and SnapKV and H2O at the gates' bytes."""
    if "base" not in folders:
        raise RuntimeError("there is no model to compare: the training did not begin")
    dtype = "float32" if place.device == "cpu" else "bfloat16"
    fields = [
        f"{name}: {{path: '{folder}', dtype: {dtype}{'' if name == 'base' else ', policies: [full]'}}}"
        for name, folder in folders.items()
    ]
    learned = [name for name in folders if name != "base"]
    output = place.output.resolve() / "train" / "compare"
    shutil.rmtree(output, ignore_errors=True)
    settings = [
        f"models={{{', '.join(fields)}}}", "policies=[full,snapkv,h2o]",
        f"budgets=[{','.join(f'bytes:{name}' for name in learned)}]", f"tasks=[{', '.join(_tasks(place))}]",
        f"engine.max_batch_size={place.size(32, 2)}", f"output={output}",
    ]  # fmt: skip
    log, failed = place.output.resolve() / "train.compare.log", ""
    try:
        ran("compare", settings, log, place.seconds_left - 5)
    except (RuntimeError, TimeoutError) as error:
        failed = str(error)
    yield from _cells(output / "cells.jsonl")
    if failed:
        raise RuntimeError(failed)


def _tasks(place: Place) -> list[str]:
    """Return the tasks, at 2,048 tokens, in one grid."""
    cache = f"cache_folder: '{(place.output / 'cache').resolve()}'"
    length, scored = place.size(1792, 96), place.size(256, 16)
    tasks = [
        f"{{name: text, like: text_loss, num_samples: {place.size(32, 2)}, context_tokens: {length}, "
        f"scored_tokens: {scored}, bucket_tokens: {scored}, {cache}}}"
    ]
    depths = "" if not place.is_tiny else ", depths: [0.5]"
    return tasks + [
        f"{{name: {name}_at_length, like: {name}, lengths: [{place.size(2048, 128)}], "
        f"samples_per_place: {place.size(4, 2)}{depths}{f', {cache}' if name == 'needle' else ''}}}"
        for name in ("needle", "passkey")
    ]


def _cells(path: Path) -> Rows:
    """Yield the main metric of each finished cell."""
    from dmc.results.store import Store

    if not path.exists():
        return
    frame: Any = Store(path).frame()
    for line in frame[frame["is_main"] & (frame["by"] == "")].itertuples():
        method = f"{line.model}, {'full' if line.is_full else line.policy}{f' {line.budget}' if line.budget else ''}"
        held = (
            f"CR {line.end_ratio:.2f} at the end, {line.bytes_per_token:.0f} bytes a token, {line.num_samples} samples"
        )
        yield row(f"{line.task}: {method}", float(line.value), line.metric, held)
