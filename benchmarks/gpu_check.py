"""What whoever gets a GPU runs first: tests, parity, training, kernels against the hardware's limits, throughput.

python scripts/gpu_check.py

Every part is a process of its own with a time limit, so that one that fails or hangs stops no other, and what is
measured is written down at once: `gpu_check.md` and `gpu_check.json`. Without a GPU it says what it would do.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import decode_kernels
import torch
import training_kernels
from timings import Case, medians
from torch import Tensor

from dmc import Engine, retrofit
from dmc.compression import CompressionConfig, GateMode, GateTrace, compression_loss
from dmc.kernels import BACKENDS
from dmc.models import next_tokens, with_token_losses
from dmc.models.build import random_model, twin
from dmc.models.masked_attention import masked_attention
from dmc.models.modeling import for_unpadded
from dmc.provenance import provenance
from dmc.results.benchmark import BenchmarkConfig, BenchmarkedModel, run_benchmark
from dmc.training.flops import peak_flops

OUTPUT = "outputs/gpu_check"
GATES = {"merge": {}, "merge, delay 16": {"delay": 16}, "drop, delay 16": {"action": "drop", "delay": 16}}
LARGEST_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Of results that should be equal: log-probabilities, attention, gradients."""
Rows = Iterator[dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """One thing to check: a command, which appends rows as lines of JSON to the file named by its last argument."""

    what: str
    seconds: int
    command: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Where a part measures, and whether on little."""

    device: str
    is_tiny: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    def size(self, size: int, tiny: int) -> int:
        return tiny if self.is_tiny else size

    def shape(self, num_layers: int) -> dict[str, Any]:
        """A model of a 7B's width, with 8 KV heads."""
        sizes = {"hidden_size": (4096, 64), "intermediate_size": (11008, 96), "vocab_size": (32000, 97)}
        heads = {"num_attention_heads": (32, 4), "num_key_value_heads": (8, 2)}
        return {
            "model_type": "llama", "num_hidden_layers": num_layers,
            **{name: pair[self.is_tiny] for name, pair in (sizes | heads).items()},
        }  # fmt: skip

    def milliseconds(self, cases: Mapping[str, Case]) -> dict[str, float]:
        """Medians of cases that take turns, the device's work included."""

        def finished(case: Case) -> None:
            case()
            if self.device == "cuda":
                torch.cuda.synchronize()

        waiting = {name: lambda case=case: finished(case) for name, case in cases.items()}
        return medians(waiting, self.size(9, 1), warm_up=self.size(2, 0))


def row(measured: str, value: float, unit: str, beside: str = "", *, holds: bool | None = None) -> dict[str, Any]:
    return {"measured": measured, "value": value, "unit": unit, "beside": beside, "holds": holds}


def check_tests(place: Place) -> Rows:
    selection = ["--collect-only", "tests/kernels/test_triton.py"] if place.is_tiny else ["tests"]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *selection], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    last = (done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]])[-1]
    yield row("pytest -m gpu", done.returncode, "exit code", last, holds=done.returncode == 0)


def attention_by_definition(query: Tensor, key: Tensor, value: Tensor, log_keep: Tensor, scaling: float) -> Tensor:
    """Compute `masked_attention` with T x T scores in float32; as many query heads as KV heads."""
    bias = log_keep.unsqueeze(-2).repeat_interleave(query.shape[2], 2)
    bias = bias.masked_fill(torch.eye(query.shape[2], dtype=torch.bool, device=query.device), 0.0)
    scores = query.float() @ key.float().mT * scaling + bias
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ value.float()).to(query.dtype)


def check_parity(place: Place) -> Rows:
    """Every backend against the reference on a whole engine, and training attention against its definition."""
    for dtype in (torch.float32, torch.bfloat16):
        stock = random_model(place.shape(1), dtype, place.device)  # in a second layer the last bit may turn a decision
        generator = torch.Generator().manual_seed(0)
        lengths = [place.size(700, 20), place.size(300, 9)]
        prompts = [torch.randint(stock.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]
        for gates, changes in {"full cache": None, **GATES}.items():
            model = twin(stock)
            if changes is not None:  # every other token, for keys spread evenly about 0
                model = retrofit(model, CompressionConfig(decision_offset=0.0, **changes))
            expected = Engine(model, kernels="reference", block_size=16).score(prompts, prompts[::-1])
            for kernels in BACKENDS[1:]:
                try:
                    engine = Engine(model, kernels=kernels, block_size=256 if kernels == "flash" else 16)
                except (ValueError, ImportError) as error:
                    yield row(f"{kernels}, {gates}, {dtype}", 0, "", f"does not serve this: {error}"[:120])
                    continue
                pairs = zip(engine.score(prompts, prompts[::-1]), expected, strict=True)
                worst = max(float((got - best).abs().max()) for got, best in pairs)
                holds = worst <= LARGEST_DIFFERENCE[dtype]
                yield row(f"{kernels}, {gates}, {dtype}", worst, "nats", "of the reference, at most", holds=holds)
        heads, length, dim = place.size(8, 2), place.size(777, 33), place.size(128, 16)
        states = [torch.randn(1, heads, length, dim, device=place.device, dtype=dtype) for _ in range(3)]
        log_keep = torch.nn.functional.logsigmoid(torch.randn(1, heads, length, device=place.device))
        results = []
        for attend in (masked_attention, attention_by_definition):
            leaves = [each.clone().requires_grad_() for each in (*states, log_keep)]
            out = attend(*leaves, dim**-0.5)
            results.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)])
        worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True))
        holds = worst <= LARGEST_DIFFERENCE[dtype]
        yield row(f"training attention, {dtype}", worst, "of the largest", "of its definition", holds=holds)


def check_training(place: Place) -> Rows:
    """Training attention against causal SDPA, and a whole step against the stock model's."""
    sizes = (1, place.size(32, 4), place.size(8, 2), place.size(4096, 32), place.size(128, 16))
    cases, leaves = training_kernels.attention_cases(sizes, 16, {"device": place.device, "dtype": place.dtype})
    cases.pop("SDPA with a dense bias")
    steps = {name: partial(training_kernels.step, case, leaves) for name, case in cases.items()}
    yield from beside_first(place.milliseconds(steps), "attention, forward and backward")
    stock = random_model(place.shape(2), torch.float32, place.device)
    found = {}
    for gates, changes in {"stock model": None, **GATES}.items():
        model = for_unpadded(with_token_losses(twin(stock)))
        if changes is not None:
            model = retrofit(twin(stock), CompressionConfig(**changes))
        if place.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        found |= place.milliseconds({gates: training_step(model.train(), place)})
        if place.device == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**30
            yield row(f"training step, {gates}, peak memory", peak, "GiB")
    yield from beside_first(found, f"training step, T {place.size(4096, 32)}")


def training_step(model: Any, place: Place) -> Case:
    """A step of one sequence: forward under autocast, backward, fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    input_ids = torch.randint(model.config.vocab_size, (1, place.size(4096, 32)), device=place.device)
    has_gates = hasattr(model, "compression")

    def step() -> None:
        trace = GateTrace()
        gates = {"gate_mode": GateMode(noise_seeds=[0]), "gate_trace": trace} if has_gates else {}
        with torch.autocast(place.device, torch.bfloat16):
            losses = model(input_ids, use_cache=False, targets=next_tokens(input_ids), **gates)
        loss = losses.cross_entropy.mean()
        if has_gates:
            loss = loss + compression_loss(trace.stacked_alpha(), 4.0, delay=model.compression.delay)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def check_kernels(place: Place) -> Rows:
    """Decode against the bandwidth that a copy reaches, prefill against causal SDPA and the peak."""
    buffer = torch.empty(place.size(2**30, 2**16), dtype=torch.uint8, device=place.device)
    copied = place.milliseconds({"copy": buffer.clone})["copy"]
    bandwidth = 2 * buffer.numel() / copied / 1e6
    yield row("copy on the device", bandwidth, "GB/s")
    dtype = str(place.dtype).removeprefix("torch.")
    options = Namespace(
        kernels="triton" if place.device == "cuda" else "reference", dtype=dtype, block_size=16, ratio=4.0
    )
    batch, heads, group, length, dim = (place.size(*pair) for pair in ((8, 1), (8, 2), (4, 2), (16384, 64), (128, 16)))
    with torch.device(place.device):
        cases = decode_kernels.decode_cases((batch, heads, group, length, dim), options)
    whole = 2 * batch * heads * length * dim * place.dtype.itemsize
    shares = {"ragged": 1 / 4, "one long": 1 / 100 + 1 / (batch * heads)}
    for name, milliseconds in place.milliseconds(cases).items():
        reached = whole * shares.get(name.split(", ")[-1], 1) / milliseconds / 1e6
        yield row(f"decode, {name}", milliseconds, "ms", f"{reached:.0f} GB/s, {reached / bandwidth:.0%} of a copy")
    del cases
    length = place.size(4096, 32)
    with torch.device(place.device):
        cases = decode_kernels.prefill_cases((1, heads, group, length, dim), options)
    operations = 2 * heads * group * length**2 * dim  # of the causal half of both products
    peak = peak_flops(torch.cuda.get_device_name(), "bf16") if place.device == "cuda" else None
    for name, milliseconds in place.milliseconds(cases).items():
        share = f"{operations / milliseconds * 1e3 / peak:.0%} of the peak" if peak and "append" not in name else ""
        yield row(f"prefill, {name}", milliseconds, "ms", share)


def check_speed(place: Place) -> Rows:
    """Throughput of the engine, and the largest batch, at CR 1 to 8."""
    config = BenchmarkConfig(
        BenchmarkedModel(shape=place.shape(place.size(8, 1)), dtype=str(place.dtype).removeprefix("torch.")),
        prompt_length=place.size(2048, 32),
        batch_sizes=[place.size(32, 2)],
        ratios=[1.0, 4.0] if place.is_tiny else [1.0, 2.0, 4.0, 8.0],
        hugging_face=False,
        new_tokens=place.size(16, 4),
        memory=place.size(2**29, 2**17),
    )
    stock = random_model(config.model.shape or {}, place.dtype, place.device)
    models = {
        ratio: twin(stock) if ratio == 1 else retrofit(twin(stock), CompressionConfig()) for ratio in config.ratios
    }
    for found in run_benchmark(config, models):
        metrics, name = found["metrics"], found["policy"]
        if "largest_batch" in metrics:
            in_bytes = f"in {found['coordinates']['memory'] / 2**20:.0f} MiB of pages"
            yield row(f"largest batch, {name}", metrics["largest_batch"], "sequences", in_bytes)
        else:
            beside = f"achieved CR {found['achieved_ratio']:.2f}, first token {metrics['first_token_seconds']:.2f} s"
            title = f"{name}, batch {found['coordinates']['batch']}"
            yield row(title, metrics["tokens_per_second"], "tokens/s", beside)


def beside_first(found: Mapping[str, float], title: str) -> Rows:
    first = next(iter(found.values()))
    for name, milliseconds in found.items():
        yield row(f"{title}: {name}", milliseconds, "ms", f"{milliseconds / first:.2f} x the first")


CHECKS: dict[str, tuple[Callable[[Place], Rows], int]] = {
    "tests": (check_tests, 150),
    "parity": (check_parity, 90),
    "training": (check_training, 90),
    "kernels": (check_kernels, 60),
    "speed": (check_speed, 130),
}
"""What measures each part, and after how many seconds it is ended: less than nine minutes together."""


def parts_of(device: str, is_tiny: bool) -> dict[str, Part]:
    """Make the parts out of `CHECKS`."""
    size = ["--tiny"] if is_tiny else []
    return {
        name: Part(
            (check.__doc__ or "pytest -m gpu").strip().rstrip("."), seconds,
            (sys.executable, __file__, "--device", device, *size, "--part", name, "--rows"),
        )
        for name, (check, seconds) in CHECKS.items()
    }  # fmt: skip


def run_part(name: str, part: Part) -> list[dict[str, Any]]:
    """Run a part to its end or its time limit; the last row says how it ended."""
    with TemporaryDirectory() as folder:
        rows, log = Path(folder) / "rows", Path(folder) / "log"
        rows.touch()
        start = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*part.command, str(rows)], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = process.wait(part.seconds)
                outcome = "done" if code == 0 else f"exit code {code}"
            except subprocess.TimeoutExpired:
                code, outcome = 1, f"ended after {part.seconds} s"
            finally:
                if process.poll() is None:  # its own processes too
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        found = [json.loads(line) for line in rows.read_text().splitlines() if line.endswith("}")]
        if code:
            outcome += ": " + " / ".join(log.read_text(errors="replace").strip().splitlines()[-2:])
    found.append(row("this part", time.monotonic() - start, "s", outcome, holds=code == 0))
    return [{"part": name, **each} for each in found]


def run_parts(parts: Mapping[str, Part], folder: Path) -> list[dict[str, Any]]:
    """Run parts one after the other, and write down after each what there is."""
    rows: list[dict[str, Any]] = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        print(f"{name}: {part.what} (at most {part.seconds} s)", flush=True)
        rows += run_part(name, part)
        (folder / "gpu_check.md").write_text(table_of(rows))
        (folder / "gpu_check.json").write_text(json.dumps({"rows": rows, "provenance": provenance()}, indent=1))
    return rows


def table_of(rows: list[dict[str, Any]]) -> str:
    """Write rows as a Markdown table."""
    lines = ["| part | measured | value | | holds |", "|---|---|---|---|---|"]
    for each in rows:
        holds = {True: "yes", False: "**no**", None: ""}[each["holds"]]
        beside = each["beside"].replace("|", "/")
        lines.append(
            f"| {each['part']} | {each['measured']} | {each['value']:.4g} {each['unit']} | {beside} | {holds} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run all parts, or one; return the exit code: 1 where something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default=OUTPUT, help=f"folder of the tables ({OUTPUT})")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try the program itself")
    parser.add_argument("--tiny", action="store_true", help="on little")
    parser.add_argument("--part", choices=CHECKS, help="this one alone, in this process")
    parser.add_argument("--rows", type=Path, help="with --part: file that rows are appended to")
    options = parser.parse_args(arguments)
    if options.part is not None:
        for found in CHECKS[options.part][0](Place(options.device, options.tiny)):
            line = json.dumps(found)
            print(line, flush=True)
            if options.rows is not None:
                with options.rows.open("a") as file:
                    file.write(line + "\n")
        return 0
    parts = parts_of(options.device, options.tiny)
    if options.device == "cuda" and not torch.cuda.is_available():
        most = sum(part.seconds for part in parts.values()) / 60
        print(f"no GPU here. On a machine with one this would run, in at most {most:.0f} minutes:")
        for name, part in parts.items():
            print(f"  {name}: {part.what} (at most {part.seconds} s)")
        print(f"and write {options.output}/gpu_check.md and gpu_check.json")
        return 0
    rows = run_parts(parts, Path(options.output))
    print(table_of(rows), end="")
    return int(any(each["holds"] is False for each in rows))


if __name__ == "__main__":
    sys.exit(main())
