"""Measure speed and memory: python scripts/benchmark.py prompt_length=8192 batch_sizes=1,8 ratios=1,4."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas
import torch
from omegaconf import DictConfig, OmegaConf

from dmc import load_model, retrofit
from dmc.command_line import script
from dmc.compression import CompressionConfig
from dmc.config import build_config
from dmc.models.build import random_model, twin
from dmc.provenance import provenance
from dmc.results.benchmark import BenchmarkConfig, format_table, run_benchmark
from dmc.results.plots import draw_speed


def build_models(config: BenchmarkConfig) -> tuple[dict[float, Any], Any | None]:
    """Give every contestant its model, all over the same weights."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if config.model.path is not None:
        stock = load_model(config.model.path, dtype=config.model.dtype).to(device)
    else:
        stock = random_model(config.model.shape or {}, getattr(torch, config.model.dtype), device, config.seed)
    models = {
        ratio: twin(stock) if ratio == 1 else retrofit(twin(stock), CompressionConfig(delay=config.delay))
        for ratio in config.ratios
    }
    return models, twin(stock) if config.hugging_face else None


@script("benchmark")
def main(settings: DictConfig) -> None:
    config = build_config(BenchmarkConfig, OmegaConf.to_container(settings, resolve=True))  # type: ignore[arg-type]
    folder = Path(config.output)
    models = build_models(config)

    def store(row: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "results.jsonl").open("a") as file:
            file.write(json.dumps({**row, "settings": asdict(config), **provenance()}) + "\n")

    rows = run_benchmark(config, *models, store)
    table = format_table(rows)
    (folder / "table.md").write_text(table + "\n")
    draw_speed(pandas.DataFrame(rows).dropna(subset="token_seconds")).write(folder / "pareto.png")
    print(f"\n{table}\n\n{folder / 'results.jsonl'}, {folder / 'pareto.png'}")


if __name__ == "__main__":
    main()
