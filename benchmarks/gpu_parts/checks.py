"""What must hold on a GPU: its tests, parity with the reference, every trainer, vLLM's tokens."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from parity import LARGEST_DIFFERENCE, check_serving

from dmc.models.masked_attention import masked_attention
from gpu_parts.attention import by_definition, draw_gates
from gpu_parts.place import ROOT, Figure, Place, Rows, row
from gpu_parts.runs import CONTROL, last_line, script, text_settings


def test_figures(place: Place) -> Iterator[Figure]:
    """Tests that need a GPU"""
    yield Figure("pytest -m gpu", partial(_check_tests, place))


def parity_figures(place: Place) -> Iterator[Figure]:
    """Every way of serving against the reference, token by token; training attention against its definition"""
    yield Figure("training attention", partial(_check_attention, place))
    yield Figure("serving", partial(check_serving, place))


def trainer_figures(place: Place) -> Iterator[Figure]:
    """A short retrofit with each trainer, on one rank, to its export"""
    names = ["cpu"] if place.device == "cpu" else ["gpu", "gpu trainer.compile=true", "ddp", "fsdp2"]
    if place.device == "cuda" and importlib.util.find_spec("deepspeed") is not None:
        names += [f"deepspeed_zero{stage}" for stage in ("1", "2", "3", "3_offload")]
    for name in names:  # one by one: several would meet at one port where a variable names it
        yield Figure(f"trainer={name}", partial(_check_trainer, place, name))


def vllm_figures(place: Place) -> Iterator[Figure]:
    """Exported folders in vLLM: the tokens of the engine, requests held and tokens a second beside stock vLLM's"""
    yield Figure("vLLM", partial(_check_vllm, place))


def _check_tests(place: Place) -> Rows:
    selection = ["tests/kernels/test_triton.py", "tests/kernels", "tests/runtime/test_decode_step.py", "tests/models"]
    selection = ["--collect-only", *selection[:1]] if place.is_tiny else selection[1:]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rfE", "--tb=short", "--maxfail=10"]
    command += [f"--numprocesses={min(8, os.cpu_count() or 1)}", "-p", "no:cacheprovider", *selection]
    last = "no output"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)  # into the part's log, whatever happens next
            last = line.strip() or last
    yield row("pytest -m gpu", process.returncode, "exit code", last, holds=process.returncode == 0)


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
        log = Path(folder) / "log"
        code = script("train", settings, log, place.seconds_left)
        print(log.read_text(errors="replace"), flush=True)
        yield row(f"trainer={name}", code, "exit code", last_line(log), holds=code == 0)


def _check_vllm(place: Place) -> Rows:
    if importlib.util.find_spec("vllm") is None:
        yield row("vLLM", 0, "versions installed", "pip install '.[vllm]' in this environment, or leave it")
        return
    from vllm_check import check_folders

    yield from check_folders(place)
