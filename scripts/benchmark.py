"""Measure speed and memory: python scripts/benchmark.py prompt_length=8192 batch_sizes=1,8 ratios=1,4.

A server of OpenAI's API under load: python scripts/benchmark.py server=http://127.0.0.1:8000 'load.rates=[1,4,null]'.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dmc.config.command_line import script


def build_models(config: Any) -> tuple[dict[float, Any], Any | None]:
    """Return the model of every decoder, all sharing the same weights."""
    import torch

    from dmc import load_model, retrofit
    from dmc.compression import CompressionConfig
    from dmc.models.build import random_model, twin

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if config.model.path is not None:
        stock = load_model(config.model.path, dtype=config.model.dtype).to(device)
    else:
        stock = random_model(config.model.shape or {}, getattr(torch, config.model.dtype), device, config.seed)
    gates = CompressionConfig(delay=config.delay)
    models = {ratio: twin(stock) if ratio == 1 else retrofit(twin(stock), gates) for ratio in config.ratios}
    return models, twin(stock) if config.hugging_face else None


@script("benchmark")
def main(settings: DictConfig) -> None:
    from dmc.config import build_config
    from dmc.results.benchmark import BenchmarkConfig, run_benchmark
    from dmc.results.load import LoadConfig, report_load
    from dmc.results.store import Store
    from dmc.results.tables import write_tables

    values: Any = OmegaConf.to_container(settings, resolve=True)
    server, load = values.pop("server"), values.pop("load")
    if server is not None:
        return print(report_load(build_config(LoadConfig, {"server": server, "output": values["output"], **load})))
    config = build_config(BenchmarkConfig, values)
    folder, keys = Path(config.output), []
    for row in run_benchmark(config, *build_models(config)):
        store = Store(folder / "cells.jsonl")  # no folder before a row
        store.append(row)
        keys.append(row["key"])
    print(f"\n{write_tables(store, folder, keys=keys)}\n\n{store.path}")


if __name__ == "__main__":
    main()
