"""What whoever gets a GPU runs first: tests, parity, training, kernels against the hardware's limits, throughput.

python scripts/gpu_check.py

Every part is a process of its own with a time limit, so that one that fails or hangs stops no other, and what is
measured is written down at once: `gpu_check.md` and `gpu_check.json`, and what it printed in a log of its own. Without
a GPU it says what it would do. Triton's interpreter runs the kernels on a CPU:

TRITON_INTERPRET=1 python scripts/gpu_check.py --device cpu --tiny --part parity
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import decode_kernels
import torch
import training_kernels
from parity import GATES, LARGEST_DIFFERENCE, Rows, check_serving, choose_tokens, row, sampler_case
from timings import Case, medians
from torch import Tensor

from dmc import retrofit
from dmc.compression import CompressionConfig, GateMode, GateTrace, compression_loss
from dmc.models import next_tokens, with_token_losses
from dmc.models.build import random_model, twin
from dmc.models.masked_attention import masked_attention
from dmc.models.modeling import for_unpadded
from dmc.results.benchmark import BenchmarkConfig, run_benchmark
from dmc.results.provenance import provenance
from dmc.training.flops import peak_flops

OUTPUT = "outputs/gpu_check"
CALLS = 20
"""Launches of a kernel that are timed together, so that what the host takes for one is not counted."""


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

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        every = (torch.float32, torch.bfloat16, torch.float16)
        return every[:1] if is_interpreted() else every[: 2 if self.device == "cpu" else 3]

    @property
    def has_triton(self) -> bool:
        """Whether Triton's kernels run: on a GPU, or by Triton's interpreter, in float32."""
        return self.device == "cuda" or is_interpreted()

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

    def milliseconds(self, cases: Mapping[str, Case], calls: int = 1, *, recorded: bool = False) -> dict[str, float]:
        """Medians of cases that take turns, of a GPU by its own clock over so many calls each.

        `recorded`: the calls are replayed from a CUDA graph, so that a short kernel does not wait for its launches.
        """
        rounds, warm_up = self.size(9, 1), self.size(2, 0)
        if self.device == "cpu":
            return medians(dict(cases), rounds, warm_up=warm_up)
        if recorded:
            cases = {name: record(case, calls) for name, case in cases.items()}
        found: dict[str, list[float]] = {name: [] for name in cases}
        for turn in range(rounds + warm_up):
            for name, case in cases.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(1 if recorded else calls):
                    case()
                end.record()
                end.synchronize()
                if turn >= warm_up:
                    found[name].append(begin.elapsed_time(end) / calls)
        return {name: statistics.median(times) for name, times in found.items()}


def record(case: Case, calls: int) -> Case:
    """Record so many calls of a case in a CUDA graph, whose replay is returned."""
    case()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            case()
    return graph.replay


def is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def check_tests(place: Place) -> Rows:
    """Tests that need a GPU"""
    selection = ["tests/kernels/test_triton.py", "tests/kernels", "tests/runtime/test_decode_step.py", "tests/models"]
    selection = ["--collect-only", *selection[:1]] if place.is_tiny else selection[1:]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rfE", "--tb=short", "--maxfail=10"]
    command += [f"--numprocesses={min(8, os.cpu_count() or 1)}", "-p", "no:cacheprovider", *selection]
    last = "no output"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)  # into the part's log, whatever happens next
            last = line.strip() or last
    yield row("pytest -m gpu", process.returncode, "exit code", last, holds=process.returncode == 0)


def attention_by_definition(query: Tensor, key: Tensor, value: Tensor, log_keep: Tensor, scaling: float) -> Tensor:
    """Compute `masked_attention` with T x T scores in float32; as many query heads as KV heads."""
    bias = log_keep.unsqueeze(-2).repeat_interleave(query.shape[2], 2)
    bias = bias.masked_fill(torch.eye(query.shape[2], dtype=torch.bool, device=query.device), 0.0)
    scores = query.float() @ key.float().mT * scaling + bias
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ value.float()).to(query.dtype)


def check_parity(place: Place) -> Rows:
    """Every way of serving against the reference, token by token, and training attention against its definition."""
    yield from check_serving(place)
    for dtype in place.dtypes[:2]:
        heads, length, dim = place.size(8, 2), place.size(777, 33), place.size(128, 16)
        states = [torch.randn(1, heads, length, dim, device=place.device, dtype=dtype) for _ in range(3)]
        log_keep = torch.nn.functional.logsigmoid(torch.randn(1, heads, length, device=place.device))
        results = []
        for attend in (masked_attention, attention_by_definition):
            leaves = [tensor.clone().requires_grad_() for tensor in (*states, log_keep)]
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


def check_trainers(place: Place) -> Rows:
    """A short retrofit with each trainer, on one rank, to its export"""
    names = ["cpu"] if place.device == "cpu" else ["gpu", "gpu trainer.compile=true", "ddp", "fsdp2"]
    if place.device == "cuda" and importlib.util.find_spec("deepspeed") is not None:
        names += [f"deepspeed_zero{stage}" for stage in ("1", "2", "3", "3_offload")]
    root = Path(__file__).parents[1]
    with TemporaryDirectory() as folder:
        settings = [
            f"model={root}/dmc/demo_models/control", "compression=dmc_hidden", "training=short_measured",
            "data=text_files", f"data.train.text.name={root}/dmc/kernels/*.py",
            f"data.validation.text.name={root}/dmc/config/*.py", f"data.cache_folder={folder}/cache",
            "training.sequence_length=256", "training.batch_size=4", "training.micro_batch_size=2",
            "training.sensitivity_init.sequences=2", "training.calibration_sequences=2",
            "training.validation_sequences=4", "training.stages.retrofit.length=3 steps",
            "training.stages.solidify.length=1 steps", "trainer.devices=1",
        ]  # fmt: skip
        command = [sys.executable, str(root / "scripts" / "train.py"), *settings]
        for index, name in enumerate(names):  # one by one: several would meet at one port where a variable names it
            run = subprocess.run(
                [*command, *f"trainer={name}".split(), f"output_dir={folder}/{index}"],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, check=False,
            )  # fmt: skip
            print(run.stdout, flush=True)
            last = run.stdout.strip().splitlines()[-1] if run.stdout.strip() else "no output"
            yield row(f"trainer={name}", run.returncode, "exit code", last[-100:], holds=run.returncode == 0)


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
    target = torch.empty_like(buffer)
    copied = place.milliseconds({"copy": partial(target.copy_, buffer)}, CALLS)["copy"]
    bandwidth = 2 * buffer.numel() / copied / 1e6
    yield row("copy on the device", bandwidth, "GB/s")
    dtype = str(place.dtype).removeprefix("torch.")
    options = Namespace(kernels="triton" if place.has_triton else "reference", dtype=dtype, block_size=16, ratio=4.0)
    batch, heads, group, length, dim = (place.size(*pair) for pair in ((8, 1), (8, 2), (4, 2), (16384, 64), (128, 16)))
    with torch.device(place.device):
        cases = decode_kernels.decode_cases((batch, heads, group, length, dim), options)
    all_bytes = 2 * batch * heads * length * dim * place.dtype.itemsize
    shares = {"ragged": 1 / 4, "one long": 1 / 100 + 1 / (batch * heads)}
    for name, milliseconds in place.milliseconds(cases, CALLS, recorded=True).items():
        reached = all_bytes * shares.get(name.split(", ")[-1], 1) / milliseconds / 1e6
        yield row(f"decode, {name}", milliseconds, "ms", f"{reached:.0f} GB/s, {reached / bandwidth:.0%} of a copy")
    if place.has_triton:
        yield from sweep(place, cases["triton, ragged"])
    del cases
    length = place.size(4096, 32)
    with torch.device(place.device):
        cases = decode_kernels.prefill_cases((1, heads, group, length, dim), options)
    operations = 2 * heads * group * length**2 * dim  # of the causal half of both products
    peak = peak_flops(torch.cuda.get_device_name(), "bf16") if place.device == "cuda" else None
    for name, milliseconds in place.milliseconds(cases, CALLS).items():
        share = f"{operations / milliseconds * 1e3 / peak:.0%} of the peak" if peak and "append" not in name else ""
        yield row(f"prefill, {name}", milliseconds, "ms", share)
    draws = {"greedy": {"temperature": 0}, "top_k 50": {"top_k": 50}, "top_p 0.9": {"top_p": 0.9}}
    samplers = {name: partial(choose_tokens, *sampler_case(place, **options)) for name, options in draws.items()}
    yield from beside_first(place.milliseconds(samplers, CALLS), "sampler, 64 rows")


def sweep(place: Place, case: Case) -> Rows:
    """Time decode attention with other tunings than this chip's; the fastest belongs into `decode.TUNINGS`."""
    from dmc.kernels.triton import decode

    today = decode.tuning_of(torch.device(place.device))
    others = itertools.product((2, 3, 4), (5, 7), (8192, 16384))
    found: dict[str, float] = {}
    for tuning in dict.fromkeys([today, *(decode.Tuning(*numbers) for numbers in others)]):
        with patch.object(decode, "tuning_of", lambda device, tuning=tuning: tuning):
            found |= place.milliseconds({str(tuning): case}, CALLS, recorded=True)
    yield from beside_first(found, "sweep")
    fastest = min(found, key=lambda name: found[name])
    capability = torch.cuda.get_device_capability() if place.device == "cuda" else None
    yield row("fastest tuning", found[fastest], "ms", f"TUNINGS[{capability}] = {fastest}; today {today}")


def check_speed(place: Place) -> Rows:
    """Throughput of the engine, and the largest batch, at CR 1 to 8."""
    config = BenchmarkConfig(
        shape=place.shape(place.size(8, 1)),
        dtype=str(place.dtype).removeprefix("torch."),
        prompt_length=place.size(2048, 32),
        batch_sizes=[place.size(32, 2)],
        ratios=[1.0, 4.0] if place.is_tiny else [1.0, 2.0, 4.0, 8.0],
        hugging_face=False,
        new_tokens=place.size(16, 4),
        memory=place.size(2**29, 2**17),
    )
    stock = random_model(config.shape or {}, place.dtype, place.device)
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


def check_vllm(place: Place) -> Rows:
    """Exported folders in vLLM: the tokens of the engine, requests held and tokens a second beside stock vLLM's."""
    if importlib.util.find_spec("vllm") is None:
        yield row("vLLM", 0, "versions installed", "pip install '.[vllm]' in this environment, or leave it")
        return
    from vllm_check import check_folders

    yield from check_folders(place)


def beside_first(found: Mapping[str, float], title: str) -> Rows:
    first = next(iter(found.values()))
    for name, milliseconds in found.items():
        yield row(f"{title}: {name}", milliseconds, "ms", f"{milliseconds / first:.2f} x the first")


CHECKS: dict[str, tuple[Callable[[Place], Rows], int]] = {
    "tests": (check_tests, 420),
    "parity": (check_parity, 480),
    "trainers": (check_trainers, 480),
    "training": (check_training, 80),
    "kernels": (check_kernels, 75),
    "speed": (check_speed, 120),
    "vllm": (check_vllm, 900),
}
"""What measures each part, and after how many seconds it is ended: less than 43 minutes together, 28 without vLLM."""


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


def run_part(name: str, part: Part, folder: Path) -> list[dict[str, Any]]:
    """Run a part to its end or its time limit, once more with blocking launches if it failed on a GPU.

    What it printed stays in `<name>.log`, and `<name>.blocking.log`, whose traceback names the launch at fault. The
    last row says how it ended.
    """
    found, code, outcome, seconds = _run_once(part, folder / f"{name}.log", {})
    if code > 0 and torch.cuda.is_available():
        _run_once(part, folder / f"{name}.blocking.log", {"CUDA_LAUNCH_BLOCKING": "1"})
        outcome += f"; again with blocking launches: {name}.blocking.log"
    found.append(row("this part", seconds, "s", outcome, holds=code == 0))
    return [{"part": name, **line} for line in found]


def _run_once(part: Part, log: Path, changes: dict[str, str]) -> tuple[list[dict[str, Any]], int, str, float]:
    """Return the rows, the exit code (negative: the time was up), how it ended, and the seconds."""
    with TemporaryDirectory() as folder, log.open("wb") as output:
        rows = Path(folder) / "rows"
        rows.touch()
        start = time.monotonic()
        process = subprocess.Popen(
            [*part.command, str(rows)], stdout=output, stderr=subprocess.STDOUT, env=os.environ | changes,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = abs(process.wait(part.seconds))
            outcome = "done" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            code, outcome = -1, f"ended after {part.seconds} s"
        finally:
            if process.poll() is None:  # its own processes too
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        seconds = time.monotonic() - start
        found = [json.loads(line) for line in rows.read_text().splitlines() if line.endswith("}")]
    if code:
        outcome += ": " + " / ".join(log.read_text(errors="replace").strip().splitlines()[-2:])
    return found, code, outcome, seconds


def run_parts(parts: Mapping[str, Part], folder: Path) -> list[dict[str, Any]]:
    """Run parts one after the other, and write down after each what there is."""
    rows: list[dict[str, Any]] = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        print(f"{name}: {part.what} (at most {part.seconds} s)", flush=True)
        rows += run_part(name, part, folder)
        (folder / "gpu_check.md").write_text(table_of(rows))
        (folder / "gpu_check.json").write_text(json.dumps({"rows": rows, "provenance": provenance()}, indent=1))
    return rows


def table_of(rows: list[dict[str, Any]]) -> str:
    """Write rows as a Markdown table."""
    lines = ["| part | measured | value | | holds |", "|---|---|---|---|---|"]
    for line in rows:
        holds = {True: "yes", False: "**no**", None: ""}[line["holds"]]
        beside = line["beside"].replace("|", "/")
        lines.append(
            f"| {line['part']} | {line['measured']} | {line['value']:.4g} {line['unit']} | {beside} | {holds} |"
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
    return int(any(line["holds"] is False for line in rows))


if __name__ == "__main__":
    sys.exit(main())
