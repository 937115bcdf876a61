"""The quickstart: train a tiny base that retrieves, its control and its retrofit, and measure all of them.

They answer questions about facts in a compressed text, and predict text after a long context.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from dmc.data.config import FactsConfig
from dmc.models import load_model
from dmc.models.loading import load_tokenizer, load_with_tokenizer
from dmc.results.compare import compare
from dmc.results.grid import CompareConfig, EngineSettings, plan_grid
from dmc.results.measurement import FULL
from dmc.results.report import read_folders, write_page
from dmc.runtime import Engine, SamplingParams
from dmc.training.config import RunConfig
from dmc.training.model_folder import is_final
from dmc.training.run import train

NUM_TOGETHER = 32
"""Number of sequences that are read at the same time."""
TRAINING_FREE = ["h2o", "tova", "snapkv"]
"""Policies that run on the control, in as many bytes as the retrofit holds."""
PROMPT = "def read_lines(path):\n"
CONTROL, RETROFIT = "control", "retrofit"


def run_quickstart(base: RunConfig, control: RunConfig, retrofit: RunConfig, folder: Path, configs: Path) -> None:
    """Run or reuse the three trainings, measure every exported model, print the table, write it and a page.

    Args:
        base: pretraining of the base.
        control: the base trained on for as many steps as the retrofit.
        retrofit: zero-out, ramp and solidify.
        folder: folder of all outputs.
        configs: folder of policies and tasks.
    """
    start, models = time.perf_counter(), dict[str, Path]()
    was_trained = all(is_final(Path(config.output_dir) / "final") for config in (base, control, retrofit))
    for number, (name, config) in enumerate({"base": base, CONTROL: control, RETROFIT: retrofit}.items(), start=1):
        print(f"[{number}/4] {name}: {config.output_dir}, after {time.perf_counter() - start:.0f} s", flush=True)
        models[name] = train(config).final
    print(f"[4/4] measure the exported models, after {time.perf_counter() - start:.0f} s", flush=True)
    grid = replace(grid_of(models, retrofit, folder), overwrite=not was_trained)
    table = compare(grid, configs, load_with_tokenizer, only_this_grid=True)
    findings = read_folders([folder], grid.reference, {cell.key for cell in plan_grid(grid, configs)})
    page = write_page(findings, folder / "report", "Quickstart: a tiny Llama, retrofitted")
    sample = _sample(models[RETROFIT])
    print(f"\n{sample}\n{table}\n\n{time.perf_counter() - start:.0f} s in all; as a page: {page}")


def grid_of(models: dict[str, Path], retrofit: RunConfig, folder: Path) -> CompareConfig:
    """Return the grid of all models: questions about facts in the report split's text, and prediction of the text."""
    data, length = retrofit.data, retrofit.training.sequence_length
    facts, tasks = data.facts or FactsConfig(), []
    for name, source in getattr(data, data.reported_split).items():
        loss = {"_target_": "dmc.results.tasks.TextLoss", "source": source, "scored_tokens": length // 4}
        loss |= {"num_samples": retrofit.training.validation_sequences, "context_tokens": length - length // 4}
        recall = {"_target_": "dmc.results.tasks.FactRecall", "haystack": source, "lengths": [length]}
        recall |= {"keys": facts.keys, "num_keys": facts.num_keys, "questions": min(8, facts.keys)}
        both = {f"{name} recall": recall, f"{name} loss": loss}
        tasks += [{"name": task, "cache_folder": data.cache_folder} | settings for task, settings in both.items()]
    compared = {
        name: {"path": str(path), "policies": None if name == CONTROL else [FULL]} for name, path in models.items()
    }
    policies, budgets = [FULL, *TRAINING_FREE], [f"bytes:{RETROFIT}"]
    engine = EngineSettings(max_batch_size=NUM_TOGETHER)
    return CompareConfig(compared, policies, tasks, budgets, engine, reference=CONTROL, output=str(folder))


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
