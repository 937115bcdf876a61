"""Rows as compare.py and benchmark.py write them, of a grid that nobody has to wait for."""

import json
import math
import random
from pathlib import Path

from dmc.models.loading import load_with_tokenizer
from dmc.results.compare import run_cells
from dmc.results.grid import plan_grid
from dmc.results.measurement import new_row
from dmc.results.store import Store
from dmc.results.tables import write_tables

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
POLICIES = ("streaming_llm", "h2o", "tova", "snapkv", "ada_snapkv", "cam", "d2o", "quest")
PROMPT_METHODS, READERS, UNEVEN = ("snapkv", "ada_snapkv"), ("quest",), ("ada_snapkv",)
LENGTHS, DEPTHS = [512, 1024, 2048, 4096], [0.0, 0.25, 0.5, 0.75, 1.0]
PROVENANCE = {
    "command": "dmc compare 'models={base: DIR, retrofit: DIR}' policies=[full,h2o]",
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "git_commit": "0123456789abcdef",
    "machine": "x86_64 Linux",
}
BYTES = 2048
TINY_NEEDLE = {
    **{"like": "passkey", "haystack": "a ", "fact": "{number}.", "question_text": "? It is", "max_new_tokens": 2},
    **{"lengths": [40], "depths": [0.5], "samples_per_place": 2},
}
"""A task of `compare.py` with prompts of 40 tokens."""
NEEDLE = {"name": "needle", **TINY_NEEDLE}


def on_command_line(**values):
    """Write a mapping as Hydra reads it."""
    return f"{{{', '.join(f'{name}: {json.dumps(value)}' for name, value in values.items())}}}"


def compare_row(policy, ratio=1.0, task="loss", *, model="base", learned=False, **changes):
    """Return a finished row; quality falls with the ratio, paired over 32 samples."""
    draw = random.Random(f"{policy} {ratio} {task}")
    samples = random.Random(task)
    skill = random.Random(policy).uniform(0.3, 1.5)
    lost = 0.02 * skill * math.log2(ratio) ** 2
    higher = task != "loss"
    if higher:
        values = [float(samples.random() > 0.08 + 2 * lost) for _ in range(32)]
    else:
        values = [3.0 + samples.gauss(0, 0.5) + lost + draw.gauss(0, 0.03) * (ratio > 1) for _ in range(32)]
    achieved = 1.0 if policy in READERS else 1 + (ratio - 1) * (0.4 if policy in PROMPT_METHODS else 1)
    budget = None if policy == "full" else f"{ratio:g}"
    row = {
        "key": f"{model} {policy} {budget} {task}",
        "method": f"{model}, {'learned' if learned else policy}",
        **{"model": model, "learned": learned, "policy": policy, "budget": budget, "task": task},
        **{"requested_ratio": ratio, "samples_key": task},
        **{"main_metric": "exact_match" if higher else "loss", "higher_is_better": higher},
        **{"settings": {"task": {}}, "device": "cpu", "provenance": PROVENANCE, "status": "done"},
        "metrics": {"exact_match" if higher else "loss": sum(values) / 32},
        **{"sample_values": values, "samples": 32, "achieved_ratio": achieved, "head_ratios": _heads(policy, achieved)},
        **{"bytes_allocated": int(256 * BYTES / achieved), "bytes_allocated_per_token": BYTES / achieved + 10},
        **{
            "mean_bytes_allocated_per_token": BYTES / achieved + 20,
            "mean_achieved_ratio": achieved,
            "mean_tokens": 200.0,
        },
        "peak_bytes_allocated": int(256 * BYTES / achieved),
    }
    if higher:
        row["by_length_and_depth"] = _needles(lost)
    else:
        positions = list(range(1, 2048, 128))
        losses = [3.0 + 2 / (1 + position / 200) + lost * position / 1024 for position in positions]
        row["by_position"] = {"position": positions, "samples": [32] * len(positions), "loss": losses}
    return {**row, **changes}


def _heads(policy, ratio):
    draw = random.Random(policy)
    spread = 0.45 if policy in UNEVEN or policy == "full" else 0.0
    return [[ratio * (1 + spread * draw.uniform(-1, 1)) for _ in range(8)] for _ in range(12)]


def _needles(lost):
    def found(length, depth):
        return round(max(0.0, 1 - lost * 6 * math.log2(length / 256) * (1 - abs(2 * depth - 1))), 2)

    table = [[found(length, depth) for depth in DEPTHS] for length in LENGTHS]
    samples = [[4] * len(DEPTHS)] * len(LENGTHS)
    return {"length": LENGTHS, "depth": DEPTHS, "samples": samples, "exact_match": table}


def compare_grid(policies=POLICIES):
    """Return methods at 3 budgets on 2 tasks, the full cache, a retrofit, an outlier of CAM, a failure of TOVA."""
    rows = []
    for task in ("loss", "needle"):
        rows.append(compare_row("full", task=task))
        rows += [compare_row(policy, ratio, task) for policy in policies for ratio in (2.0, 4.0, 8.0)]
        rows.append(compare_row("full", 4.0, task, model="retrofit", learned=True))
    worst = next(row for row in rows if row["key"] == "base cam 8 loss")
    worst["metrics"], worst["sample_values"] = {"loss": 9.5}, [9.5] * 32
    failed = next(row for row in rows if row["key"] == "base tova 8 needle")
    for name in ("metrics", "sample_values", "samples", "by_length_and_depth", "achieved_ratio", "head_ratios"):
        del failed[name]
    failed |= {"status": "failed", "error": "ValueError: a budget of 1 entry has no room for the newest token"}
    return rows


def lm_eval_row(policy, ratio, benchmark, task, value, **changes):
    """Return a finished row of a task of a benchmark with members `<benchmark>_a` and `<benchmark>_b`."""
    row = compare_row(policy, ratio, task)
    row.pop("by_length_and_depth", None)
    row.pop("by_position", None)
    row |= {
        "benchmark": benchmark,
        "members": [f"{benchmark}_a", f"{benchmark}_b"],
        "main_metric": "acc",
    }
    right = [float(index < value * 32) for index in range(32)]
    row |= {"metrics": {"acc": value}, "errors": {"acc": 0.01}, "sample_values": right, "samples_key": task}
    row |= {"num_fewshot": [5], "prompts_cut": 0}
    return {**row, **changes}


def benchmark_rows(**task):
    """Return three decoders at three batch sizes, and a largest batch."""
    rows = []
    command = {"provenance": PROVENANCE | {"command": "dmc benchmark prompt_length=4096"}}
    decoders = (("engine CR 1", 1.0, 1.2), ("engine CR 4", 4.0, 2.6), ("hugging face, static cache", 1.0, 1.0))
    for name, ratio, speed in decoders:
        settings = {"model": {"path": None}, "policy": {"ratio": ratio}, "task": task}
        shared = {"requested_ratio": ratio, "achieved_ratio": ratio, **command}
        for batch_size in (1, 4, 16):
            seconds = (0.012 + 0.004 * batch_size / speed) / speed**0.3
            metrics = {"tokens_per_second": batch_size / seconds, "token_seconds": seconds}
            shared |= {"metrics": metrics | {"first_token_seconds": 2.0 * batch_size}}
            shared |= {"coordinates": {"batch": batch_size, "length": 4096}}
            shared |= {"peak_bytes_allocated": int(2**25 * batch_size / ratio)}
            rows.append(new_row("random weights", name, "speed", settings, **shared))
    largest = {"metrics": {"largest_batch": 30}, "coordinates": {"memory": 2**29}, "achieved_ratio": None, **command}
    settings = {"model": {"path": None}, "policy": {"ratio": 4.0}, "task": task}
    return [*rows, new_row("random weights", "engine CR 4", "speed", settings, requested_ratio=4.0, **largest)]


def run_grid(config):
    """Measure the unfinished cells of a grid and return its store."""
    store = Store(Path(config.output) / "cells.jsonl")
    run_cells(plan_grid(config, CONFIGS), store, lambda model: load_with_tokenizer(model.path))
    return store


def write_rows(rows, path):
    """Write rows as lines and return their folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.parent


def plain_row(policy, budget, values, **changes):
    """Return a finished row with these values of its samples."""
    row = {
        "key": f"{policy} {budget}", "status": "done", "model": "base", "method": f"base, {policy}", "policy": policy,
        "learned": False, "budget": budget, "task": "text", "settings": {},
        "samples_key": "s",
        "main_metric": "loss", "higher_is_better": False, "metrics": {"loss": sum(values) / len(values)},
        "sample_values": values, "samples": len(values), "achieved_ratio": 3.96, "bytes_allocated": 1000,
        "bytes_used": 900, "peak_tokens": 10, "bytes_allocated_per_token": 100.0, "bytes_used_per_token": 90.0,
        "requested_ratio": float(budget) if budget and budget.isdigit() else 1.0, "device": "cpu",
        "mean_achieved_ratio": 3.9, "mean_bytes_allocated_per_token": 110.0,
        "mean_bytes_used_per_token": 99.0, "mean_tokens": 8.0, "peak_bytes_allocated": 1000,
    }  # fmt: skip
    return {**row, **changes}


def write_report(rows, folder):
    """Store rows and write their tables."""
    store = Store(folder / "rows" / "cells.jsonl")
    for row in rows:
        store.append(row)
    return write_tables(store, folder)
