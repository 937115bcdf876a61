"""The main job on the embedded default: base, control and retrofit of a tiny model, and one honest table."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from dmc.budget import Budget
from dmc.config import RunConfig
from dmc.loading import load_tokenizer
from dmc.models import load_model
from dmc.policies import H2O, TOVA
from dmc.provenance import provenance
from dmc.results.report import read_folders, write_page
from dmc.runtime import Engine, SamplingParams, Scoring
from dmc.runtime.forced import of_given_tokens
from dmc.training import TrainedRun, train
from dmc.training.text_data import TextData

NUM_TOGETHER = 32
"""Sequences that are read at the same time."""
TRAINING_FREE = {"h2o": H2O, "tova": TOVA}
"""What the control is compared under: each holds as many bytes as the retrofit does on average over the text."""
SAME_BYTES = 0.02
"""Share by which they may differ where entries allow it."""
PROMPT = "def read_lines(path):\n"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    loss: float
    """Nats per token."""
    achieved_ratio: float
    """Tokens over entries held, in sum over all positions of the text."""
    bytes_per_token: float
    """Cache bytes allocated per token over the same positions: pages, tables and all other state."""
    final_ratio: float
    """Tokens over entries held after the last token of a text: what a target means."""
    over_control_error: float | None = None
    """Standard error of the loss over the control's, paired; None for the control."""

    def values(self) -> dict[str, float | None]:
        """Figures for `results.json`."""
        return {name: value for name, value in asdict(self).items() if name != "name"}


def run_quickstart(base: RunConfig, control: RunConfig, retrofit: RunConfig, folder: Path) -> dict[str, Any]:
    """Run or reuse the three trainings, measure every exported model, print the table, write `results.json` and a page.

    Args:
        base: pretraining of the base.
        control: the base trained on for as many steps as the retrofit.
        retrofit: zero-out, ramp and solidify.
        folder: everything lies below it.
    Returns:
        The results as written.
    """
    seconds = _Stopwatch(folder / "seconds.json")
    runs = {}
    for number, (name, config) in enumerate((("base", base), ("control", control), ("retrofit", retrofit)), start=1):
        print(f"[{number}/4] {name}: {config.output_dir}", flush=True)
        with seconds.timing(name):
            runs[name] = train(config)
    print("[4/4] measure the exported models", flush=True)
    with seconds.timing("measure"):
        rows, num_sequences = _measure(retrofit, runs)
        sample = _sample(runs["retrofit"].final)
    results = {
        "base": rows["base"].values(),
        "control": rows["control"].values(),
        "final": rows["final"].values(),
        "snapshots": {f"{ratio:g}": rows[f"CR {ratio:g}"].values() for ratio in runs["retrofit"].snapshots},
        "training_free": {name: rows[f"control, {name}"].values() for name in TRAINING_FREE},
        "target_ratio": retrofit.target_ratio,
        "split": retrofit.data.reported_split,
        "sequences": num_sequences,
        "seconds": seconds.total,
        "seconds_by_part": seconds.parts,
        "sample": sample,
        **provenance(),
    }
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    table = format_table(list(rows.values()), retrofit.data.reported_split)
    (folder / "results.md").write_text(table + "\n")
    page = write_page(read_folders([folder]), folder / "report", "Quickstart: a tiny Llama, retrofitted")
    print(f"\n{sample}\n\n{table}\n\n{seconds.total:.0f} s in all; {folder / 'results.json'}; as a page: {page}")
    return results


def format_table(rows: list[Row], split: str = "test") -> str:
    """Write rows as a Markdown table; the control's loss is the yardstick."""
    yardstick = next(row.loss for row in rows if row.name == "control")
    lines = [
        f"| model | loss (nats/token, {split} split) | over the control | CR at the end | CR held "
        "| cache bytes/token |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        error = "" if row.over_control_error is None else f" ± {row.over_control_error:.3f}"
        lines.append(
            f"| {row.name} | {row.loss:.3f} | {row.loss - yardstick:+.3f}{error} | {row.final_ratio:.2f} "
            f"| {row.achieved_ratio:.2f} | {row.bytes_per_token:,.0f} |"
        )
    return "\n".join(lines)


def _measure(retrofit: RunConfig, runs: dict[str, TrainedRun]) -> tuple[dict[str, Row], int]:
    """Let every model read the held-out text, and the control with as much memory as the retrofit holds."""
    models = {"base": runs["base"].final, "control": runs["control"].final}
    models |= {f"CR {ratio:g}": path for ratio, path in runs["retrofit"].snapshots.items()}
    models["final"] = runs["retrofit"].final
    tokenizer = load_tokenizer(runs["base"].final)
    texts = torch.cat([each["input_ids"] for each in TextData(retrofit, tokenizer, total_steps=1).test_batches()])
    readings = {
        name: _read(Engine(load_model(path), max_batch_size=NUM_TOGETHER), texts, name) for name, path in models.items()
    }
    control = load_model(models["control"])
    for name, policy in TRAINING_FREE.items():
        title = f"control, {name}"
        readings[title] = _read_in_as_many_bytes(control, policy, readings["final"], texts, title)
    yardstick = readings["control"].losses
    return {name: reading.row(name, yardstick) for name, reading in readings.items()}, len(texts)


@dataclass(frozen=True)
class _Reading:
    """What a model made of held-out sequences, read from the first token on."""

    losses: Tensor
    """Of each sequence."""
    achieved_ratio: float
    final_ratio: float
    bytes_per_token: float

    def row(self, name: str, yardstick: Tensor) -> Row:
        difference = self.losses - yardstick
        error = float(difference.std() / len(difference) ** 0.5) if len(difference) > 1 and difference.any() else None
        return Row(name, float(self.losses.mean()), self.achieved_ratio, self.bytes_per_token, self.final_ratio, error)


def _read(engine: Engine, texts: Tensor, name: str) -> _Reading:
    """Score every token after the first; a training-free method acts token by token, as a retrofit does."""
    found: list[Scoring] = []
    for batch in tqdm(texts.split(NUM_TOGETHER), f"{name} reads", leave=False):
        tokens = batch.tolist()
        found += engine.score_with_stats([text[:1] for text in tokens], [text[1:] for text in tokens], of_given_tokens)
    stats = [scoring.stats for scoring in found]
    heads, seen = stats[0].slots.numel(), sum(each.mean_tokens_seen for each in stats)
    return _Reading(
        torch.stack([-scoring.logprobs.double().mean() for scoring in found]),
        seen * heads / sum(float(each.mean_slots.sum()) for each in stats),
        heads * sum(each.tokens_seen for each in stats) / sum(int(each.slots.sum()) for each in stats),
        sum(each.mean_bytes_allocated for each in stats) / seen,
    )


def _read_in_as_many_bytes(control: Any, policy: Any, wanted: _Reading, texts: Tensor, name: str) -> _Reading:
    """Read under the budget at which a method holds as many bytes as the retrofit: pages and tables are not entries."""
    ratio = wanted.achieved_ratio
    for _ in range(3):
        budget = Budget(ratio=max(1.0, ratio))
        reading = _read(Engine(control, policy=policy(budget=budget), max_batch_size=NUM_TOGETHER), texts, name)
        excess = reading.bytes_per_token / wanted.bytes_per_token
        if abs(excess - 1) <= SAME_BYTES:
            break
        ratio *= excess
    return reading


def _sample(folder: Path) -> str:
    tokenizer = load_tokenizer(folder)
    params = SamplingParams(max_new_tokens=96, temperature=0.7, top_p=0.95, seed=0)
    (generation,) = Engine(load_model(folder), tokenizer).generate([PROMPT], params)
    stats = generation.stats
    title = f"A sample of the compressed model (CR {stats.achieved_ratio:.2f} over its {stats.tokens_seen} tokens):"
    return f"{title}\n\n{PROMPT}{generation.text}"


class _Stopwatch:
    """Sums the seconds of each part over restarts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts: dict[str, float] = json.loads(path.read_text()) if path.is_file() else {}

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return sum(self.parts.values())

    def timing(self, name: str) -> _Timing:
        """Time a part; what it took before a restart is kept."""
        return _Timing(self, name)


@dataclass
class _Timing:
    stopwatch: _Stopwatch
    name: str
    start: float = 0.0

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        parts, path = self.stopwatch.parts, self.stopwatch.path
        parts[self.name] = round(parts.get(self.name, 0.0) + time.perf_counter() - self.start, 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(parts))
