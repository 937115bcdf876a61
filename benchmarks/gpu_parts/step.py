"""Steps of training as a user runs them: eager, compiled, without recomputation; their kernels, and the share of the peak."""  # noqa: E501

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from gpu_parts.place import Figure, Place, Rows, row
from gpu_parts.runs import logged, model_of, ran, random_folder, text_settings

STEPS, PROFILED = 12, 2
WARM_UP = 4
"""Steps of a start that do not count: they compile, and fill caches."""
WAYS = {
    "eager": {"trainer.compile": "false", "training.activation_checkpointing": "true"},
    "compiled": {"trainer.compile": "true", "training.activation_checkpointing": "true"},
    "no recomputation": {"trainer.compile": "false", "training.activation_checkpointing": "false"},
    "compiled, no recomputation": {"trainer.compile": "true", "training.activation_checkpointing": "false"},
}
SHORT = [
    "training.stages.zero_out.length=null", "training.stages.solidify.length=null", "training.snapshot_ratios=[]",
    "training.sensitivity_init=null", "training.calibrate=false", "training.validate_every_steps=1000",
    "training.checkpoint_every_steps=1000", "training.validation_sequences=2", "training.log_every_steps=1",
]  # fmt: skip


def figures(place: Place) -> Iterator[Figure]:
    """Twelve steps each of eager, compiled and not recomputed training: time, MFU, memory, kernels, launches"""
    for way, settings in list(WAYS.items())[: place.size(len(WAYS), 2)]:
        yield Figure(way, partial(_steps, place, way, settings))
    if not place.is_tiny:
        yield Figure("Qwen3-0.6B", partial(_large_steps, place))


def _steps(place: Place, way: str, settings: dict[str, str]) -> Rows:
    """Train SmolLM2, or a model of its shape, all weights, 16 sequences of 2,048 tokens a step."""
    model, what = model_of(place)
    sizes = {"sequence_length": (2048, 128), "batch_size": (16, 4), "micro_batch_size": (16, 2)}
    changes = [f"training.{name}={pair[place.is_tiny]}" for name, pair in sizes.items()]
    changes += [f"model={model}", "compression=dmc_hidden", "training=retrofit_measured"]
    changes += [f"compression.delay={place.size(64, 8)}", *text_settings(place)]
    title = f"{what}, {sizes['batch_size'][place.is_tiny]} x {sizes['sequence_length'][place.is_tiny]} tokens, {way}"
    changes += [f"{name}={value}" for name, value in settings.items()]
    yield from _run(place, title, changes, STEPS)


def _large_steps(place: Place) -> Rows:
    """Train Qwen3-0.6B's shape by its recipe, compiled and not recomputed: 64 sequences of 4,096 tokens a step."""
    model = random_folder(place, "qwen3_0p6b")
    changes = [f"model={model}", "experiment=qwen3_0p6b_cr4", *text_settings(place)]
    changes += [f"{name}={value}" for name, value in WAYS["compiled, no recomputation"].items()]
    title = "Qwen3-0.6B's shape, 64 x 4096 tokens, compiled, no recomputation"
    yield from _run(place, title, changes, 4, warm_up=2)


def _run(place: Place, title: str, changes: list[str], steps: int, warm_up: int = WARM_UP) -> Rows:
    """Run so many steps; yield a step's time, tokens a second, MFU, memory, and where the time goes."""
    place.output.mkdir(parents=True, exist_ok=True)
    begin = steps - PROFILED - 1
    trainer = "cpu" if place.device == "cpu" else "gpu"
    with TemporaryDirectory(dir=place.output.resolve()) as folder:
        profile = Path(folder) / "profile.json"
        callback = f"+callbacks.profile={{_target_: gpu_parts.profiling.KernelProfile, path: '{profile}', "
        settings = [
            *changes, *SHORT, f"training.stages.retrofit={{length: {steps} steps, ramp_to: null}}",
            f"trainer={trainer}", f"output_dir={folder}/run", f"{callback}begin: {begin}, steps: {PROFILED}}}",
        ]  # fmt: skip
        ran("train", settings, place.output.resolve() / "step.train.log", place.seconds_left)
        found = {
            name: [value for step, value in logged(Path(folder) / "run", f"train/{name}").items() if step >= warm_up]
            for name in ("seconds_per_step", "tokens_per_second", "mfu", "peak_memory_gib")
        }
        seconds = statistics.median(found["seconds_per_step"][: begin - warm_up])
        yield row(f"{title}: a step", seconds, "s", f"median of {begin - warm_up}")
        yield row(f"{title}: tokens", statistics.median(found["tokens_per_second"][: begin - warm_up]), "tokens/s")
        if found["mfu"]:
            share = 100 * statistics.median(found["mfu"][: begin - warm_up])
            yield row(f"{title}: MFU", share, "%", f"of {_peak() / 1e12:.0f} TFLOP/s, the data sheet's dense bfloat16")
        yield row(f"{title}: peak memory", max(found["peak_memory_gib"]), "GiB")
        if profile.exists():
            yield from profile_rows(title, json.loads(profile.read_text()), seconds)


def profile_rows(title: str, profile: dict, seconds: float) -> Rows:
    """Yield launches of a step, the busy share, and the kernels that take most of the time.

    Args:
        title: of the run.
        profile: see `profiling.summarize`.
        seconds: a step's without the profiler, which slows the host.
    """
    yield row(f"{title}: launches of a step", profile["launches"], "kernels")
    slowed = f"{profile['busy']:.0%} while profiled, which slows the host"
    share = 100 * profile["kernel_seconds"] / seconds
    yield row(f"{title}: kernels' time over a step's", share, "%", slowed)
    for number, kernel in enumerate(profile["top"], 1):
        beside = f"{kernel['calls']:g} calls, {kernel['name'][:90]}"
        yield row(f"{title}: kernel {number}", 100 * kernel["share"], "% of kernels' time", beside)


def _peak() -> float:
    from dmc.training.flops import peak_flops

    return peak_flops(torch.cuda.get_device_name(), "bf16") or float("nan")
