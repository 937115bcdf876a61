"""What must hold on a GPU: its tests, parity with the reference, every trainer, vLLM's tokens."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from parity import LARGEST_DIFFERENCE, check_graphs, check_sampler, check_serving, check_waits

from dmc.models.masked_attention import masked_attention
from gpu_parts.attention import by_definition, draw_gates
from gpu_parts.place import ROOT, Figure, Place, Rows, row
from gpu_parts.runs import CONTROL, last_line, script, text_settings

TRAINER_SECONDS = 150
"""Of one trainer, so that one that hangs leaves time for others."""
LAST_SECONDS = 10
"""Kept at a part's end, to write what was found."""
OUTCOME = re.compile(
    r"\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED) (.+)|(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b.*%\]"
)
"""A line of `pytest -v` for a test that has ended, of several processes or one."""
OWN_ENVIRONMENT = (
    "not run: vLLM is not installed; it takes an environment of its own: python -m venv .venv-vllm; "
    ".venv-vllm/bin/pip install -e '.[vllm]'; .venv-vllm/bin/python scripts/gpu_check.py --part vllm"
)


def test_figures(place: Place) -> Iterator[Figure]:
    """Tests that need a GPU"""
    yield Figure("pytest -m gpu", partial(_check_tests, place))


def parity_figures(place: Place) -> Iterator[Figure]:
    """Every way of serving against the reference, token by token; training attention against its definition"""
    yield Figure("training attention", partial(_check_attention, place))
    yield Figure("sampler", partial(check_sampler, place))
    serving = [Figure(f"serving, {dtype}", partial(check_serving, place, dtype)) for dtype in place.dtypes]
    yield serving[0]
    yield Figure("CUDA graphs, two engines", partial(check_graphs, place))
    yield from serving[1:2]
    if place.device == "cuda":
        yield Figure("waits", partial(check_waits, place))
    yield from serving[2:]  # time ran out before it on an H100


def trainer_figures(place: Place) -> Iterator[Figure]:
    """A short retrofit with each trainer, on one rank, to its export"""
    names = ["cpu"] if place.device == "cpu" else ["gpu", "gpu trainer.compile=true", "ddp", "fsdp2"]
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    if place.device == "cuda" and has_deepspeed:
        names += [f"deepspeed_zero{stage}" for stage in ("1", "2", "3", "3_offload")]
    for name in names:  # one by one: several would meet at one port where a variable names it
        yield Figure(f"trainer={name}", partial(_check_trainer, place, name))
    if not has_deepspeed:
        missing = row("trainer=deepspeed_zero*", None, "", "not run: pip install -e '.[deepspeed]'")
        yield Figure("DeepSpeed", lambda: [missing])


def vllm_figures(place: Place) -> Iterator[Figure]:
    """Exported folders in vLLM: the tokens of the engine, requests held and tokens a second beside stock vLLM's"""
    if importlib.util.find_spec("vllm") is None:
        yield Figure("vLLM", lambda: [row("vLLM", None, "", OWN_ENVIRONMENT)])
        return
    for name in ("check_tokens", "check_speed"):
        yield Figure(f"vLLM, {name.removeprefix('check_')}", partial(_check_vllm, place, name))


def _check_tests(place: Place) -> Rows:
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    options = ["--collect-only"] if place.is_tiny else []
    if importlib.util.find_spec("xdist") is not None:
        options.append(f"--numprocesses={min(8, os.cpu_count() or 1)}")
    yield from run_tests(place, ["-m", "gpu", *options, *map(str, marked[: place.size(len(marked), 1)])])


def run_tests(place: Place, arguments: list[str]) -> Rows:
    """Run pytest until the part's time is nearly up; yield each failure as it comes, then how many passed.

    What it prints is in `tests.pytest.log`.
    """
    command = [sys.executable, "-m", "pytest", "-v", "-rfE", "--tb=short", "--maxfail=10", "-p", "no:cacheprovider"]
    log = place.output.resolve() / "tests.pytest.log"
    counts, last, rest = Counter[str](), "no output", ""
    with log.open("w") as output, log.open(errors="replace") as lines:
        process = subprocess.Popen([*command, *arguments], stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            is_ended = False
            while not is_ended:
                is_ended = process.poll() is not None or place.seconds_left < LAST_SECONDS
                *whole, rest = (rest + lines.read()).split("\n")
                for line in filter(None, map(str.strip, whole)):
                    last = line
                    if found := OUTCOME.match(line):
                        outcome, test = found[1] or found[4], found[2] or found[3]
                        counts[outcome] += 1
                        if outcome in ("FAILED", "ERROR"):
                            yield row(test, None, outcome.lower(), f"see {log.name}", holds=False)
                time.sleep(0 if is_ended else 0.5)
        finally:
            code = process.poll()
            process.kill()
            process.wait()
    if code is None:
        last = f"stopped for want of time, the others did not run; the last line: {last}"
    elif code:
        last += f"; see {log.name}"
    holds = None if code is None and not counts["FAILED"] + counts["ERROR"] else code == 0
    yield row("pytest -m gpu", counts["PASSED"], "passed", last[:300], holds=holds)


def _check_attention(place: Place) -> Rows:
    for dtype in place.dtypes[:2]:
        heads, length, dim = place.size(8, 2), place.size(777, 33), place.size(128, 16)
        states = [torch.randn(1, heads, length, dim, device=place.device, dtype=dtype) for _ in range(3)]
        log_keep = draw_gates((1, heads, length), place.device)["CR 4"]
        results = []
        for exact in (False, True):
            leaves = [(leaf.double() if exact else leaf.clone()).requires_grad_() for leaf in (*states, log_keep)]
            out = by_definition(*leaves, delay=0) if exact else masked_attention(*leaves, dim**-0.5)
            results.append([out.detach(), *torch.autograd.grad(out.double().square().sum(), leaves)])
        worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True))
        holds = worst <= LARGEST_DIFFERENCE[dtype]
        yield row(f"training attention, {dtype}", worst, "of the largest", "of its definition", holds=holds)


def _check_trainer(place: Place, name: str) -> Rows:
    with TemporaryDirectory() as folder:
        text = text_settings(Place(place.device, True, output=Path(folder)))  # the repository's own
        settings = [
            f"model={CONTROL}", "compression=dmc_hidden", "training=short_measured", *text,
            "training.sequence_length=256", "training.batch_size=4", "training.micro_batch_size=2",
            "training.sensitivity_init.sequences=2", "training.calibration_sequences=2",
            "training.validation_sequences=4", "training.stages.retrofit.length=3 steps",
            "training.stages.solidify.length=1 steps", "trainer.devices=1", *f"trainer={name}".split(),
            f"output_dir={folder}/run",
        ]  # fmt: skip
        log = place.output.resolve() / "trainers.train.log"
        code = script("train", settings, log, min(TRAINER_SECONDS, place.seconds_left - LAST_SECONDS))
        yield row(f"trainer={name}", code, "exit code", last_line(log), holds=code == 0)


def _check_vllm(place: Place, name: str) -> Rows:
    import vllm_check

    yield from getattr(vllm_check, name)(place)
