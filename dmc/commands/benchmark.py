"""Speed and memory of a model's engine beside `generate()`, with the same weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from dmc.compression import CompressionConfig
from dmc.config import build_config
from dmc.models import load_model, retrofit
from dmc.models.build import random_model, twin
from dmc.results.benchmark import BenchmarkConfig, run_benchmark
from dmc.results.store import Store
from dmc.results.tables import write_tables


def benchmark(values: dict[str, Any]) -> str:
    """Measure what the settings name, and return the report."""
    config = build_config(BenchmarkConfig, values)
    folder = Path(config.output)
    for row in run_benchmark(config, *_models(config)):
        store = Store(folder / "cells.jsonl")  # no folder before a row
        store.append(row)
    return f"\n{write_tables(store, folder)}\n\n{store.path}"


def _models(config: BenchmarkConfig) -> tuple[dict[float, Any], Any | None]:
    """Return the model of every decoder, all sharing the same weights.

    Raises:
        ValueError: the model has gates.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if config.model is not None:
        stock = load_model(config.model, dtype=config.dtype)
        if hasattr(stock.config, "compression"):
            raise ValueError(f"model={config.model} has gates: give its base; ratios are of synthetic gates")
        stock = stock.to(device)
    else:
        stock = random_model(config.shape or {}, getattr(torch, config.dtype), device, config.seed)
    gates = partial(CompressionConfig, delay=config.delay)
    models = {r: twin(stock) if r == 1 else retrofit(twin(stock), gates(target_ratio=r)) for r in config.ratios}
    return models, twin(stock) if config.hugging_face else None


def main(settings: Any) -> None:
    """Measure, and print the report."""
    print(benchmark(settings))
