"""Results in the format of kvpress's leaderboard (https://huggingface.co/spaces/nvidia/kvpress-leaderboard).

A folder for each method and ratio, as kvpress 0.5.5 writes it: `ruler__4096__MODEL__PRESS__RATIO[__query_aware]` with
`predictions.csv`, `metrics.json` and `config.yaml`. Its ratios are the fraction removed, 1 - 1 / CR.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas
import yaml

from dmc.results.long_context.ruler import LENGTH, string_match
from dmc.results.measurement import DONE, FULL, Row
from dmc.results.store import Store, replace_file

TASK = "kvpress_ruler"
"""Task whose rows are written."""
SAMPLES_PER_TASK = 500
TOLERANCE = 0.05
"""Difference in the fraction removed up to which a method counts as one of its requested ratio.

Methods that compress only the prompt keep the answer's tokens: 128 of them leave 0.85 of 4,224 removed, not 0.875.
"""


@dataclass(frozen=True)
class Entry:
    """One method at one ratio."""

    config: dict[str, Any]
    """Fields of kvpress's `EvaluationConfig`."""
    predictions: pandas.DataFrame

    @property
    def name(self) -> str:
        """Name of its folder."""
        config = self.config
        model, ratio = config["model"].replace("/", "--"), f"{config['compression_ratio']:.2f}"
        parts = [config["dataset"], config["data_dir"], model, config["press_name"], ratio]
        parts += [f"fraction{config['fraction']:.3f}"] if config["fraction"] < 1 else []
        parts += ["query_aware"] if config["query_aware"] else []
        return "__".join(parts)

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """Mean score of each task in percent."""
        scores: dict[str, list[float]] = {}
        lines = self.predictions
        for task, prediction, answers in zip(lines["task"], lines["predicted_answer"], lines["answer"], strict=True):
            scores.setdefault(task, []).append(string_match(task, prediction, answers))
        return {
            task: {"string_match": round(100 * sum(values) / len(values), 2)} for task, values in sorted(scores.items())
        }

    def write(self, folder: Path) -> None:
        """Write its three files."""
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(
            folder / "predictions.csv", self.predictions.to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC).encode()
        )
        replace_file(folder / "metrics.json", json.dumps(self.metrics, indent=4).encode())
        replace_file(folder / "config.yaml", yaml.safe_dump(self.config, sort_keys=False).encode())


def write_leaderboard(folders: Sequence[Path], output: Path) -> list[Path]:
    """Write the finished rows of `kvpress_ruler` in the leaderboard's format; entries of one name are numbered.

    Args:
        folders: folders of results.
        output: folder of the entries.
    Returns:
        Folders of the entries.
    Raises:
        ValueError: there is no such row, or its samples were not saved; nothing is written.
    """
    entries = [entry for folder in folders for entry in read_entries(folder)]
    if not entries:
        raise ValueError(f"leaderboard: no row of {TASK} in the folders: run dmc compare experiment=leaderboard first")
    counts, written = Counter[str](), list[Path]()
    for entry in entries:
        number = counts[entry.name]
        written.append(output / entry.name / str(number) if number else output / entry.name)
        entry.write(written[-1])
        counts[entry.name] += 1
    return written


def read_entries(folder: Path) -> list[Entry]:
    """Read the entries of a folder of results.

    Raises:
        ValueError: samples were not saved.
    """
    rows = Store(folder / "cells.jsonl").rows()
    rows = [row for row in rows if row["status"] == DONE and str(row.get("benchmark")).partition(":")[0] == TASK]
    found = []
    for row in rows:
        files = sorted((folder / "samples" / row["key"].replace("/", "__")).glob("*.jsonl"))
        if not files:
            raise ValueError(
                f"leaderboard: {row['key']} of {folder} has no samples: measure it again with "
                "lm_eval.save_samples=true overwrite=true"
            )
        samples = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        paths = {other["model"]: other["settings"]["model"]["path"] for other in rows}
        found.append(Entry(config_of(row, paths), predictions_of(row, samples)))
    return found


def config_of(row: Row, paths: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a row with kvpress's names.

    A retrofit is a press of its base, the comparison's reference. The ratio is the requested one where the cache held
    as much, else what it held.

    Args:
        row: a row of `kvpress_ruler`.
        paths: folder or hub name of each model.
    """
    name, settings, is_stock = row["model"], row["settings"], not row["learned"]
    limit = settings["lm_eval"]["limit"]
    requested, held = fraction_removed(row["requested_ratio"]), fraction_removed(row["achieved_ratio"])
    policy = None if row["policy"] == FULL else row["policy"]
    press = policy or "no_press" if is_stock else "_".join(filter(None, (name, policy)))
    options = {key: value for key, value in settings["policy"].items() if key != "_target_"}
    command = f"{settings['policy'].get('_target_')}({', '.join(f'{key}={value}' for key, value in options.items())})"
    return {
        "dataset": "ruler",
        "data_dir": LENGTH,
        "model": paths[name] if is_stock else paths.get(row["reference"], paths[name]),
        "device": row["device"],
        "press_name": press.replace("/", "--"),
        "compression_ratio": requested if abs(requested - held) <= TOLERANCE else held,
        "key_channel_compression_ratio": None,
        "fraction": 1.0 if limit is None else min(1.0, limit / SAMPLES_PER_TASK),
        "max_new_tokens": settings["lm_eval"]["max_gen_toks"],
        "max_context_length": None,
        "query_aware": row["question"] == "known",
        "needle_depth": None,
        "compression_interval": None,
        "target_size": None,
        "hidden_states_buffer_size": None,
        "output_dir": "./results",
        "log_level": "INFO",
        "model_kwargs": {},
        "trust_remote_code": False,
        "press_init_command": "; ".join(
            [*([] if is_stock else [f"dmc: {paths[name]}"]), *([] if policy is None else [command])]
        )
        or "None",
        "seed": settings["seed"],
        "fp8": False,
    }


def fraction_removed(ratio: float) -> float:
    """Return the fraction of a cache that a compression ratio removes."""
    return round(1 - 1 / ratio, 3)


def predictions_of(row: Row, samples: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """Return a line for each sample, with kvpress's columns."""
    is_aware, lines = row["question"] == "known", []
    for sample in samples:
        document = sample["doc"]
        lines.append(
            {
                "question": "" if is_aware else document["question"],
                "answer_prefix": document["answer_prefix"],
                "answer": document["answer"],
                "task": document["task"],
                "max_new_tokens": document["max_new_tokens"],
                "predicted_answer": sample["filtered_resps"][0].replace("\0", ""),  # it ends a field for pandas 2
                "compression_ratio": fraction_removed(row["achieved_ratio"]),
            }
        )
    return pandas.DataFrame(lines)
