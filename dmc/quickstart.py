"""The main job on the embedded default: base, control and retrofit of a tiny model, and one honest table."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer

from dmc.budget import Budget
from dmc.config import RunConfig
from dmc.evaluation.report import read_folders, write_page
from dmc.models import load_model
from dmc.policies import H2O, TOVA, EvictionPolicy
from dmc.provenance import provenance
from dmc.runtime import Engine, SamplingParams
from dmc.training import TrainedRun, train
from dmc.training.text_data import TextData

NUM_MEASURED = 8
"""Held-out sequences whose cache is measured in the engine."""
NUM_TOGETHER = 32
"""Sequences that a training-free method reads at the same time."""
TRAINING_FREE = {"h2o": H2O, "tova": TOVA}
"""What the control is compared under: each holds n / CR entries of the n tokens read so far."""
PROMPT = "def read_lines(path):\n"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    loss: float
    """Validation loss, nats per token."""
    achieved_ratio: float
    """Tokens over entries held, thresholded decisions, validation text."""
    bytes_per_token: float
    """Cache bytes allocated per token of a whole sequence: pages, tables and all other state."""

    def values(self) -> dict[str, float]:
        """Figures for `results.json`."""
        return {"loss": self.loss, "achieved_ratio": self.achieved_ratio, "bytes_per_token": self.bytes_per_token}


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
        rows = _measure(retrofit, runs)
        sample = _sample(runs["retrofit"].final)
    results = {
        "base": rows["base"].values(),
        "control": rows["control"].values(),
        "final": rows["final"].values(),
        "snapshots": {f"{ratio:g}": rows[f"CR {ratio:g}"].values() for ratio in runs["retrofit"].snapshots},
        "training_free": {name: rows[f"control, {name}"].values() for name in TRAINING_FREE},
        "target_ratio": retrofit.target_ratio,
        "seconds": seconds.total,
        "seconds_by_part": seconds.parts,
        "sample": sample,
        **provenance(),
    }
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    table = format_table(list(rows.values()))
    (folder / "results.md").write_text(table + "\n")
    page = write_page(read_folders([folder]), folder / "report", "Quickstart: a tiny Llama, retrofitted")
    print(f"\n{sample}\n\n{table}\n\n{seconds.total:.0f} s in all; {folder / 'results.json'}; as a page: {page}")
    return results


def format_table(rows: list[Row]) -> str:
    """Write rows as a Markdown table; the control's loss is the yardstick."""
    yardstick = next(row.loss for row in rows if row.name == "control")
    lines = [
        "| model | loss (nats/token) | over the control | achieved CR | cache bytes/token |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.name} | {row.loss:.3f} | {row.loss - yardstick:+.3f} | {row.achieved_ratio:.2f} "
            f"| {row.bytes_per_token:,.0f} |"
        )
    return "\n".join(lines)


def _measure(retrofit: RunConfig, runs: dict[str, TrainedRun]) -> dict[str, Row]:
    models = {"base": (runs["base"], runs["base"].final), "control": (runs["control"], runs["control"].final)}
    models |= {f"CR {ratio:g}": (runs["retrofit"], path) for ratio, path in runs["retrofit"].snapshots.items()}
    models["final"] = (runs["retrofit"], runs["retrofit"].final)
    tokenizer = AutoTokenizer.from_pretrained(runs["base"].final)
    batches = TextData(retrofit, tokenizer, total_steps=1).validation_batches()
    prompts = [sequence.tolist() for batch in batches for sequence in batch][:NUM_MEASURED]
    rows = {}
    for name, (run, folder) in models.items():
        metrics = run.metrics(folder)
        generations = Engine(load_model(folder)).generate(prompts, SamplingParams(max_new_tokens=1, temperature=0.0))
        allocated = sum(generation.stats.bytes_allocated for generation in generations)
        tokens = sum(generation.stats.tokens_seen for generation in generations)
        loss, ratio = metrics["validation_loss_nats_per_token"], metrics["achieved_ratio"]
        rows[name] = Row(name, loss, ratio, allocated / tokens)
    target = retrofit.target_ratio
    control = load_model(models["control"][1])
    for name, policy in TRAINING_FREE.items():
        rows[f"control, {name}"] = _measure_policy(control, policy(budget=Budget(ratio=target)), batches, name)
    return rows


def _measure_policy(model: Any, policy: EvictionPolicy, batches: list[Tensor], name: str) -> Row:
    """Read held-out sequences token by token with what the policy leaves, as a retrofit reads them."""
    engine = Engine(model, policy=policy, max_batch_size=NUM_TOGETHER)
    losses, seen, held, allocated = [], 0, 0.0, 0
    for batch in tqdm(torch.cat(batches).split(NUM_TOGETHER), f"{name} on the control", leave=False):
        texts = batch.tolist()
        scorings = engine.score_with_stats([text[:1] for text in texts], [text[1:] for text in texts])
        for text, scoring in zip(batch, scorings, strict=True):
            losses.append(F.nll_loss(scoring.logprobs, text[1:]))
            seen += scoring.stats.tokens_seen
            held += float(scoring.stats.slots.float().mean())
            allocated += scoring.stats.bytes_allocated
    return Row(f"control, {name}", float(torch.stack(losses).mean()), seen / held, allocated / seen)


def _sample(folder: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
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
