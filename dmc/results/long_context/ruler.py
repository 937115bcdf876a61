"""RULER (arXiv 2404.06654) at 4,096 tokens, over the samples of kvpress's leaderboard."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from datasets import Dataset, load_dataset

LENGTH = "4096"
CONTROL = re.compile("[\x00-\x1f]")


@functools.lru_cache(maxsize=1)
def read(data: str) -> Dataset:
    """Read all 13 tasks, from a folder with `4096/*.parquet` or the hub.

    Columns: context, question, answer_prefix, answer (a list), task, max_new_tokens.
    """
    return load_dataset(data, data_dir=LENGTH, split="test")


def documents(task: str, ruler: str = "simonjegou/ruler", **settings: Any) -> dict[str, Dataset]:
    """Return the samples of one task, for lm-eval.

    Args:
        task: name of the task in the data set.
        ruler: folder or hub name of the data set, `lm_eval.task_settings.ruler`.
        settings: those of other tasks.
    """
    table = read(ruler)
    return {"test": table.select([row for row, name in enumerate(table["task"]) if name == task])}


def process_results(document: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return the score of one answer, for lm-eval."""
    return {"string_match": string_match(document["task"], results[0], document["answer"])}


def string_match(task: str, prediction: str, answers: Sequence[str]) -> float:
    """Return the share of the answers that a prediction holds; of qa's alternative answers one is enough."""
    text = CONTROL.sub("", prediction.strip()).lower()
    found = [answer.lower() in text for answer in answers]
    return float(any(found)) if task.startswith("qa") else sum(found) / len(found)
