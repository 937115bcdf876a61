"""LongBench v2 (arXiv 2412.15204): four choices about a long text, answered in words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from datasets import Dataset, load_dataset

CONTEXT = "Please read the following text and answer the question below.\n\n<text>\n{context}\n</text>"
QUESTION = (
    "\n\nWhat is the correct answer to this question: {question}\nChoices:\n(A) {choice_A}\n(B) {choice_B}\n"
    '(C) {choice_C}\n(D) {choice_D}\n\nFormat your response as follows: "The correct answer is (insert answer here)".'
)
ANSWERS = (re.compile(r"The correct answer is \(([A-D])\)"), re.compile("The correct answer is ([A-D])"))


def documents(longbench_v2: str = "THUDM/LongBench-v2", **settings: Any) -> dict[str, Dataset]:
    """Return the data set with its prompts, for lm-eval.

    Args:
        longbench_v2: folder (with `data.json`) or hub name of the data set, `lm_eval.task_settings.longbench_v2`.
        settings: those of other tasks.
    """
    rows = load_dataset(longbench_v2, split="train")
    found = [
        {
            "context": CONTEXT.format(context=row["context"].strip()),
            "question": QUESTION.format(**{name: str(value).strip() for name, value in row.items()}),
            "answer": row["answer"],
            **{name: row[name] for name in ("difficulty", "length", "domain")},
        }
        for row in rows
    ]
    return {"test": Dataset.from_list(found)}


def process_results(document: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return the score of one answer, for lm-eval."""
    text = results[0].replace("*", "")
    letters = (found.group(1) for found in (pattern.search(text) for pattern in ANSWERS) if found)
    return {"acc": float(next(letters, None) == document["answer"])}
