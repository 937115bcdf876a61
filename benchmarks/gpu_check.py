"""What whoever gets a GPU runs first, in parts of at most nine minutes each, the most telling first.

dmc gpu-check                                  (all, in their order; without a GPU: the table of parts)
dmc gpu-check --minutes 15                     (as many of them as fit)
dmc gpu-check --part attention loss --output DIR

Every part is a process of its own with a time limit, so that one that fails or hangs stops no other. Every figure is
written at once, as a line of JSON in `<part>.jsonl`, whose first line says hardware, versions and command; a figure
that fails is a line too. After each part `gpu_check.md` and `gpu_check.json` have the figures of all `.jsonl` files in
the folder, those of earlier commands included. On a machine without a package index `scripts/gpu_bundle.sh` brings the
packages, and `python scripts/gpu_check.py` is the command. To try the program itself on a CPU:

dmc gpu-check --device cpu --tiny
TRITON_INTERPRET=1 dmc gpu-check --device cpu --tiny --part parity
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_parts.place import ROOT, Place, Row, failure, row

from dmc.results.provenance import provenance

OUTPUT = "outputs/gpu_check"
SOME_FAILED, LOST = 3, 4
"""Exit codes of a part that ran to its end, with figures that failed, and of one whose GPU failed on the way."""
LEAST_SECONDS = 30
"""With less time left no further part begins."""
BEGINS = "begins: "
"""What the log of a part has before the name of each figure."""


@dataclass(frozen=True)
class Part:
    """One part of the check."""

    what: str
    seconds: int
    """Time limit; at most nine minutes."""
    needs: str
    """What it needs beside the checkout, torch and transformers."""
    figures: str
    """Module in `gpu_parts`, and its function."""
    packages: tuple[str, ...] = ()
    """Modules without which it has no figure."""


TRAINS = "packages of `train`"
TRAIN = "hydra", "lightning", "datasets"
PARTS = {
    "attention": Part("training attention, forward and backward, four shapes", 180, "nothing", "attention.figures"),
    "loss": Part("losses over the vocabulary: time, GB/s, memory, error", 90, "nothing", "loss.figures"),
    "step": Part("12 steps each of four ways to train; kernels, MFU; Qwen3-0.6B", 480, TRAINS, "step.figures", TRAIN),
    "train": Part(
        "gates of SmolLM2-135M to CR 8, evaluated, handed out", 540,
        f"{TRAINS}, `gguf`; SmolLM2 (94 MiB in two halves; else random weights)", "train.figures", TRAIN,
    ),
    "decode": Part("tokens/s at CR 1, 4, 8; decode kernels, prompts, sampling", 240, TRAINS, "decode.figures"),
    "policies": Part("what methods add to a decode step and a prompt", 180, "pandas", "policies.figures"),
    "parity": Part("every way of serving gives the reference", 480, "nothing", "checks.parity_figures"),
    "trainers": Part(
        "a short retrofit with each trainer", 480, f"{TRAINS}; DeepSpeed for its own", "checks.trainer_figures", TRAIN,
    ),
    "tests": Part("pytest -m gpu", 420, f"{TRAINS}, `dev`", "checks.test_figures", ("pytest", "hypothesis", "aiohttp")),
    "vllm": Part(
        "vLLM: tokens of the engine, requests held, tokens/s", 540, "`vllm`, in its environment", "checks.vllm_figures",
    ),
}  # fmt: skip
"""By name, in their order."""


def table_of_parts() -> str:
    """Write what there is to run, with time limits and needs."""
    lines = ["| part | measures | at most | needs |", "|---|---|---|---|"]
    lines += [f"| {name} | {part.what} | {part.seconds} s | {part.needs} |" for name, part in PARTS.items()]
    total = sum(part.seconds for part in PARTS.values()) / 60
    return "\n".join([*lines, f"all: at most {total:.0f} minutes; --minutes 15 runs as many as fit, in this order"])


def hardware() -> dict[str, Any]:
    """Describe the machine."""
    found: dict[str, Any] = {"cpu_cores": os.cpu_count(), "processor": platform.processor() or platform.machine()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
        found |= {"capability": f"{properties.major}.{properties.minor}", "cuda": torch.version.cuda}
        query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
        try:
            found["driver"] = subprocess.run(query, capture_output=True, text=True, timeout=10).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            found["driver"] = "unknown"
    return found


def write(file: Path, line: Mapping[str, Any]) -> None:
    """Append a line of JSON, which is on the disk when this returns; print it too."""
    text = json.dumps(line)
    with file.open("a") as opened:
        opened.write(text + "\n")
        opened.flush()
        os.fsync(opened.fileno())
    print(text, flush=True)


def measure(name: str, place: Place, file: Path) -> int:
    """Measure one part in this process; return `SOME_FAILED` if a figure failed, else 0."""
    start = {"part": name, "hardware": hardware(), "device": place.device, "is_tiny": place.is_tiny}
    write(file, start | {"provenance": provenance() | {"command": os.environ.get("GPU_CHECK_COMMAND")}})
    if missing := [package for package in PARTS[name].packages if importlib.util.find_spec(package) is None]:
        lacks = f"lacks {', '.join(missing)}: pip install -e '.[train,dev]', or the parcels of scripts/gpu_bundle.sh"
        write(file, {"part": name, **row("this part's packages", None, "not run", lacks, holds=False)})
        return SOME_FAILED
    module, function = PARTS[name].figures.split(".")
    failed = False
    try:
        for figure in getattr(importlib.import_module(f"gpu_parts.{module}"), function)(place):
            print(f"{BEGINS}{figure.name}", flush=True)  # the log of a part that hangs ends with it
            failed |= _measure_one(name, figure, place, file)
            if not _has_device(place):
                lost = f"lost in: {figure.name}; what follows it is not measured"
                write(file, {"part": name, **row("the GPU", None, "failed", lost, holds=False)})
                return LOST
    except Exception as error:  # before a figure, as a package that is not there
        traceback.print_exc()
        _note(name, "this part's start", error, place, file)
        failed = True
    return SOME_FAILED if failed else 0


def _has_device(place: Place) -> bool:
    """Say whether the GPU still computes for this process; after a fault of a kernel nothing does."""
    try:
        if place.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except Exception:
        traceback.print_exc()
        return False
    return True


def _measure_one(name: str, figure: Any, place: Place, file: Path) -> bool:
    try:
        for found in figure.measure():
            write(file, {"part": name, **found, "at": round(time.monotonic() - place.started, 1)})
    except Exception as error:
        traceback.print_exc()
        _note(name, figure.name, error, place, file)
        return True
    return False


def _note(part: str, figure: str, error: Exception, place: Place, file: Path) -> None:
    write(file, {"part": part, **failure(figure, error), "at": round(time.monotonic() - place.started, 1)})


def run_part(name: str, command: list[str], folder: Path, seconds: float) -> None:
    """Run a part to its end or its time limit, once more with blocking launches if the process died on a GPU.

    What it printed stays in `<name>.log`, and `<name>.blocking.log`, whose traceback names the launch at fault. The
    last line of `<name>.jsonl` says how it ended. Figures of an earlier run move to `<name>.earlier.jsonl`.
    """
    file = folder / f"{name}.jsonl"
    if file.exists():
        file.replace(folder / f"{name}.earlier.jsonl")
    start = time.monotonic()
    try:
        code, outcome = _run_once([*command, "--rows", str(file)], folder / f"{name}.log", seconds, {})
    except BaseException:  # Ctrl-C, or the end of the job
        write(file, {"part": name, **row("this part", time.monotonic() - start, "s", "interrupted", holds=False)})
        raise
    took = time.monotonic() - start
    if code > 0 and code != SOME_FAILED and torch.cuda.is_available() and seconds - took > LEAST_SECONDS:
        log = folder / f"{name}.blocking.log"
        again = [*command, "--rows", str(folder / f"{name}.blocking.rows")]
        _run_once(again, log, seconds - took, {"CUDA_LAUNCH_BLOCKING": "1"})
        outcome += f"; again with blocking launches: {log.name}"
    write(file, {"part": name, **row("this part", took, "s", outcome, holds=code == 0)})


def _run_once(command: list[str], log: Path, seconds: float, changes: dict[str, str]) -> tuple[int, str]:
    """Return the exit code (-1: the time was up), and how it ended."""
    sources = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # where it is not installed
    environment = os.environ | {"PYTHONPATH": sources} | changes
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code = abs(process.wait(seconds))
            outcome = {0: "done", SOME_FAILED: "done, but some figures failed"}.get(code, f"exit code {code}")
        except subprocess.TimeoutExpired:
            code, outcome = -1, f"ended after {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # its own processes too, of a part that ended as well
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code not in (0, SOME_FAILED):
        said = log.read_text(errors="replace").strip().splitlines()
        begun = [line for line in said if line.startswith(BEGINS)]
        outcome += ": " + (f"in {begun[-1].removeprefix(BEGINS)}" if code == -1 and begun else " / ".join(said[-2:]))
    return code, outcome


def read_rows(folder: Path) -> list[Row]:
    """Read the figures of all parts in a folder, in the order of the parts."""
    files = [folder / f"{name}.jsonl" for name in PARTS]
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    return [found for found in map(json.loads, filter(lambda line: line.endswith("}"), lines)) if "measured" in found]


def write_tables(folder: Path) -> list[Row]:
    """Write `gpu_check.md` and `gpu_check.json`; return the figures."""
    rows = read_rows(folder)
    (folder / "gpu_check.md").write_text(table_of(rows))
    (folder / "gpu_check.json").write_text(json.dumps({"rows": rows, "provenance": provenance()}, indent=1))
    return rows


def table_of(rows: list[Row]) -> str:
    """Write rows as a Markdown table."""
    lines = ["| part | measured | value | | holds |", "|---|---|---|---|---|"]
    for line in rows:
        holds = {True: "yes", False: "**no**", None: ""}[line["holds"]]
        value = "" if line["value"] is None else f"{line['value']:.4g} "
        beside = line["beside"].replace("|", "/")
        lines.append(f"| {line['part']} | {line['measured']} | {value}{line['unit']} | {beside} | {holds} |")
    return "\n".join(lines) + "\n"


def run_all(options: argparse.Namespace, folder: Path) -> list[Row]:
    """Run the parts that were asked for, one after the other, while there is time; write the tables after each."""
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    rows: list[Row] = []
    for name in options.part or PARTS:
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            print(f"{name}: no time is left for it", flush=True)
            continue
        seconds = min(PARTS[name].seconds, left)
        log = folder / f"{name}.log"
        print(f"{name}: {PARTS[name].what} (at most {seconds:.0f} s; its figures come into {log})", flush=True)
        command = [sys.executable, str(Path(__file__).resolve()), "--device", options.device, "--part", name]
        command += ["--output", str(folder), "--seconds", f"{seconds:.0f}"]
        command += ["--tiny"] if options.tiny else []
        command += [] if options.model is None else ["--model", options.model]
        try:
            run_part(name, command, folder, seconds)
        finally:
            rows = write_tables(folder)
    return rows


def arguments_of(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{table_of_parts()}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, metavar="NAME", help="these alone, in this order")
    parser.add_argument("--output", default=OUTPUT, help=f"folder of the tables ({OUTPUT})")
    parser.add_argument("--minutes", type=float, default=90.0, help="begin no part after them, and end the last (90)")
    parser.add_argument("--model", help="folder or GGUF file of SmolLM2-135M (where the checkout has it, or random)")
    parser.add_argument("--list", action="store_true", help="print the table of parts")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try the program itself")
    parser.add_argument("--tiny", action="store_true", help="on little")
    parser.add_argument("--seconds", type=float, default=float("inf"), help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # measures one part in this process
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes:g}: expected a number above 0")
    if options.model is not None and not Path(options.model).exists():
        parser.error(f"--model {options.model} does not exist: give a folder or a GGUF file")
    return options


def _why_no_gpu() -> str:
    """Say why torch sees no GPU."""
    if torch.version.cuda is None:
        return f"no GPU here, as this torch ({torch.__version__}) is built without CUDA"
    if shutil.which("nvidia-smi"):
        return f"no GPU here that torch for CUDA {torch.version.cuda} can use: see the driver's in nvidia-smi"
    return "no GPU here"


def main(arguments: list[str] | None = None) -> int:
    """Run parts, or print what there is; return the exit code: 1 where something does not hold."""
    options = arguments_of(arguments)
    folder = Path(options.output)
    if options.rows is not None:
        folder.mkdir(parents=True, exist_ok=True)
        place = Place(options.device, options.tiny, options.model, folder, options.seconds, time.monotonic())
        return measure(options.part[0], place, options.rows)
    if options.list or (options.device == "cuda" and not torch.cuda.is_available()):
        print(("" if options.list else f"{_why_no_gpu()}. With one this would run:\n") + table_of_parts())
        return 0
    os.environ["GPU_CHECK_COMMAND"] = provenance()["command"]
    rows = run_all(options, folder)
    print(table_of(rows), end="")
    return int(any(line["holds"] is False for line in rows))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends its part, and writes the tables
    sys.exit(main())
