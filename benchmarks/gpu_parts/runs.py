"""What parts that train share: the model, its text, and a run as a process of its own."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from gpu_parts.place import ROOT, Place

PLACES = "outputs/models/smollm2-135m", "gpu_bundle/SmolLM2-135M-Instruct.Q4_1.gguf"
"""Where SmolLM2-135M-Instruct may lie in a checkout, or is put by `scripts/gpu_bundle.sh`."""
CONTROL = ROOT / "dmc" / "demo_models" / "control"
STOPPED = 75
"""Exit code of a run that a signal has stopped, and that is saved."""


def model_of(place: Place) -> tuple[str, str]:
    """Return SmolLM2's folder or file, or one of its shape with random weights, made here; and what it is."""
    if place.model is not None:
        return str(Path(place.model).resolve()), Path(place.model).name
    if place.is_tiny:
        return str(CONTROL), "the demo model"
    for path in PLACES:
        if (ROOT / path).exists():
            return str(ROOT / path), Path(path).name
    return random_folder(place, "smollm2_135m"), "random weights of SmolLM2-135M's shape"


def random_folder(place: Place, base: str) -> str:
    """Write a model of `configs/base` with random weights, and the demo models' tokenizer; return the folder."""
    from omegaconf import OmegaConf

    from dmc.models.build import random_model

    folder = place.output / f"random_{base}"
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.part")  # of a part that is ended while it writes
        settings: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "configs" / "base" / f"{base}.yaml"))
        model = random_model(settings["shape"], torch.bfloat16, place.device)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            unfinished.mkdir(parents=True, exist_ok=True)
            shutil.copy(CONTROL / name, unfinished / name)
        model.save_pretrained(unfinished)
        unfinished.rename(folder)
    return str(folder.resolve())


def text_settings(place: Place) -> list[str]:
    """Return the settings of text that every machine has: code of Python and its packages, by the model's tokenizer."""
    cache = f"data.cache_folder={(place.output / 'cache').resolve()}"
    if place.is_tiny:
        train, held_out = ROOT / "dmc" / "kernels", ROOT / "dmc" / "config"
        names = [f"data.train.text.name={train}/*.py", f"data.validation.text.name={held_out}/*.py"]
        return ["data=text_files", *names, cache]
    own = ["data.tokenizer.train_vocab_size=null", "data.tokenizer.folder=null"]
    return ["data=python_code", *own, cache, "data.num_workers=2"]


def script(name: str, settings: list[str], log: Path, seconds: float, *, stop_after: float | None = None) -> int:
    """Run one of the commands in a process of its own, its output in a log; return its exit code.

    Args:
        name: file in `scripts/` without its ending.
        settings: its arguments.
        log: file that is appended to.
        seconds: when it is killed.
        stop_after: when it is asked to stop, as before the end of a job; None: never.
    Raises:
        TimeoutError: it was killed.
    """
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "WANDB_MODE": "disabled"}
    command = [sys.executable, str(ROOT / "scripts" / f"{name}.py"), *settings]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=log.parent)
        try:
            if stop_after is not None:
                try:
                    return process.wait(max(stop_after, 0))
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGTERM)
                    seconds -= stop_after
            return process.wait(max(seconds, 1))
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"scripts/{name}.py was ended for want of time, see {log.name}") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def ran(name: str, settings: list[str], log: Path, seconds: float) -> None:
    """Run a command to its end.

    Raises:
        RuntimeError: it failed; the message has its last line.
        TimeoutError: it was killed.
    """
    if code := script(name, settings, log, seconds):
        raise RuntimeError(f"scripts/{name}.py, exit code {code}: {last_line(log)}")


def last_line(log: Path) -> str:
    """Return the last line that a log has."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][-200:] if lines else "no output"


def logged(run: Path, name: str) -> dict[int, float]:
    """Read a metric of a run from its CSV files, by step."""
    values: dict[int, float] = {}
    for path in sorted(run.glob("logs/version_*/metrics.csv")):
        with path.open() as file:
            for line in csv.DictReader(file):
                if line.get(name):
                    values[int(line["step"])] = float(line[name])
    return values


def metrics_of(folder: Path) -> dict[str, Any]:
    """Read what was measured when a model's folder was exported."""
    return json.loads((folder / "retrofit.json").read_text())["metrics"]
