"""The main job from scratch: a tiny base that retrieves, its control and its retrofit, through all stages.

They answer questions about facts in a compressed text, and predict text after a long context.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dmc.commands.quickstart import Quickstart
from dmc.data.config import FactsConfig
from dmc.results.grid import CompareConfig, EngineSettings
from dmc.results.measurement import FULL
from dmc.training.config import RunConfig

NUM_TOGETHER = 32
"""Number of sequences that are read at the same time."""
TRAINING_FREE = ["h2o", "tova", "snapkv"]
"""Policies that run on the control, in as many bytes as the retrofit holds."""
CONTROL, RETROFIT = "control", "retrofit"
RUNS = ("base", CONTROL, RETROFIT)


def from_scratch(trained: Sequence[RunConfig], folder: Path) -> Quickstart:
    """Put together the trainings, and the questions that their models are asked.

    Args:
        trained: pretraining of the base; its control, the base trained on for as many steps as the retrofit; the
            retrofit: zero-out, ramp and solidify.
        folder: folder of the results.
    """
    runs = dict(zip(RUNS, trained, strict=True))
    models = {name: Path(config.output_dir) / "final" for name, config in runs.items()}
    return Quickstart("Quickstart: a tiny Llama, retrofitted", runs, grid_of(models, runs[RETROFIT], folder))


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
