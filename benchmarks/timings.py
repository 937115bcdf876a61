"""Medians of cases that take turns, printed as they come and kept as CSV and JSON."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from dmc.results.provenance import provenance

Case = Callable[[], object]
OUTPUT = "outputs/benchmarks"
SHAPE = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 16384,
}
"""Of the model that programs build with random weights."""


def medians(
    cases: dict[str, Case],
    rounds: int,
    *,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    before: Case = lambda: None,
) -> dict[str, float]:
    """Give the median milliseconds of each case, the cases taking turns; what runs `before` each is not timed."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + warm_up):
        for name, case in cases.items():
            before()
            start = clock()
            case()
            if turn >= warm_up:
                seconds[name].append(clock() - start)
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def device_medians(
    cases: Mapping[str, Case], rounds: int, calls: int, *, warm_up: int = 2, recorded: bool = False
) -> dict[str, float]:
    """Give the median milliseconds of a call of each case by the GPU's clock, the cases taking turns.

    Args:
        cases: what is timed.
        rounds: turns of each that count.
        calls: of a case in a turn, launched without waiting for one another, so that the host's part is hidden.
        warm_up: turns before those that count.
        recorded: the calls are replayed from a CUDA graph, so that a short kernel does not wait for its launches.
    """
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


class Table:
    """Times of one program, written into `<program>.csv` and `.json` with every part, lest a stopped run leave nothing.

    Args:
        program: `__file__` of the benchmark.
        folder: where to.
    """

    def __init__(self, program: str, folder: str) -> None:
        self.path = Path(folder) / f"{Path(program).stem}.csv"
        self.rows: list[dict[str, object]] = []

    def add(self, title: str, found: dict[str, float]) -> None:
        """Print and keep milliseconds of cases, and what they are of the first one's."""
        import pandas  # not there where kernels alone are timed

        print(f"{title}, ms", flush=True)
        first = next(iter(found.values()))
        for case, milliseconds in found.items():
            print(f"  {case:36s}{milliseconds:10.2f}  {milliseconds / first:6.2f}x", flush=True)
            self.rows.append(
                {"setting": title, "case": case, "milliseconds": milliseconds, "of_first": milliseconds / first}
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        pandas.DataFrame(self.rows).to_csv(self.path, index=False)
        record = {"rows": self.rows, "provenance": provenance()}
        self.path.with_suffix(".json").write_text(json.dumps(record, indent=1))


def add_output_option(parser: argparse.ArgumentParser) -> None:
    """Let the user say where the table goes."""
    parser.add_argument("--output", default=OUTPUT, help=f"folder of the table as CSV and JSON ({OUTPUT})")
