"""The quickstart: train a tiny base that retrieves, its control and its retrofit, and measure all of them.

They answer questions about facts in a compressed text, and predict text after a long context.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dmc.config import FactsConfig, RunConfig
from dmc.loading import load_tokenizer, load_with_tokenizer
from dmc.models import load_model
from dmc.results.compare import compare
from dmc.results.grid import CompareConfig, EngineSettings, plan_grid
from dmc.results.measurement import FULL
from dmc.results.report import read_folders, write_page
from dmc.runtime import Engine, SamplingParams
from dmc.training import TrainedRun, train

NUM_TOGETHER = 32
"""Number of sequences that are read at the same time."""
TRAINING_FREE = ["h2o", "tova", "snapkv"]
"""Policies that run on the control, in as many bytes as the retrofit holds."""
PROMPT = "def read_lines(path):\n"
CONTROL, RETROFIT = "control", "retrofit"


def run_quickstart(base: RunConfig, control: RunConfig, retrofit: RunConfig, folder: Path, configs: Path) -> str:
    """Run or reuse the three trainings, measure every exported model, print the table, write it and a page.

    Args:
        base: pretraining of the base.
        control: the base trained on for as many steps as the retrofit.
        retrofit: zero-out, ramp and solidify.
        folder: folder of all outputs.
        configs: folder of policies and tasks.
    Returns:
        The table.
    """
    times = folder / "seconds.json"
    runs: dict[str, TrainedRun] = {}
    for number, (name, config) in enumerate((("base", base), (CONTROL, control), (RETROFIT, retrofit)), start=1):
        print(f"[{number}/4] {name}: {config.output_dir}", flush=True)
        with _timing(times, name):
            runs[name] = train(config)
    print("[4/4] measure the exported models", flush=True)
    grid = grid_of(runs, retrofit, folder)
    with _timing(times, "measure"):
        table = compare(grid, configs, load_with_tokenizer, only_own=True)
        sample = _sample(runs[RETROFIT].final)
    findings = read_folders([folder], grid.reference, {cell.key for cell in plan_grid(grid, configs)})
    page = write_page(findings, folder / "report", "Quickstart: a tiny Llama, retrofitted")
    total = sum(json.loads(times.read_text()).values())
    print(f"\n{sample}\n{table}\n\n{total:.0f} s in all; as a page: {page}")
    return table


def grid_of(runs: dict[str, TrainedRun], retrofit: RunConfig, folder: Path) -> CompareConfig:
    """Return the grid of all models: questions about facts in the report split's text, and prediction of the text."""
    paths = {"base": runs["base"].final, CONTROL: runs[CONTROL].final, RETROFIT: runs[RETROFIT].final}
    models = {
        name: {"path": str(path), "policies": None if name == CONTROL else [FULL]} for name, path in paths.items()
    }
    data, length = retrofit.data, retrofit.training.sequence_length
    facts, tasks = data.facts or FactsConfig(), []
    for name, source in getattr(data, data.reported_split).items():
        loss = {"_target_": "dmc.results.tasks.TextLoss", "source": source, "scored_tokens": length // 4}
        loss |= {"num_samples": retrofit.training.validation_sequences, "context_tokens": length - length // 4}
        recall = {"_target_": "dmc.results.tasks.FactRecall", "haystack": source, "lengths": [length]}
        recall |= {"keys": facts.keys, "num_keys": facts.num_keys, "questions": min(8, facts.keys)}
        both = {f"{name} recall": recall, f"{name} loss": loss}
        tasks += [{"name": task, "cache_folder": data.cache_folder} | each for task, each in both.items()]
    policies, budgets = [FULL, *TRAINING_FREE], [f"bytes:{RETROFIT}"]
    engine = EngineSettings(max_batch_size=NUM_TOGETHER)
    return CompareConfig(models, policies, tasks, budgets, engine, reference=CONTROL, output=str(folder))


def _sample(folder: Path) -> str:
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    params = SamplingParams(max_new_tokens=96, temperature=0.7, top_p=0.95, seed=0)
    (generation,) = Engine(model, tokenizer).generate([PROMPT], params)
    stats, millions = generation.stats, model.num_parameters() / 1e6
    return (
        f"A sample of the compressed model. {millions:.1f}M parameters learn to retrieve, not to write. It holds CR "
        f"{stats.achieved_ratio:.2f} over {stats.tokens_seen} tokens, for the last {model.config.compression['delay']} "
        f"always stay.\n\n{PROMPT}{generation.text}"
    )


@contextmanager
def _timing(path: Path, name: str) -> Iterator[None]:
    """Add the seconds of a part to the sum over earlier starts, in a file."""
    start = time.perf_counter()
    try:
        yield
    finally:
        parts = json.loads(path.read_text()) if path.is_file() else {}
        parts[name] = round(parts.get(name, 0.0) + time.perf_counter() - start, 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(parts))
