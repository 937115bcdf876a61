"""LongMemEval (arXiv 2410.10813): questions about a history of chats, all sessions in the prompt.

The paper's score is a judge's, a large model that its `evaluate_qa.py` asks; it reads the saved answers. Without one,
`holds_answer` tells whether an answer has the words of the right one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

BEFORE = (
    "I will give you several history chats between you and a user. Please answer the question based on the relevant "
    "chat history.\n\n\nHistory Chats:\n\n"
)


def documents(longmemeval: str | None = None, **settings: Any) -> dict[str, Dataset]:
    """Return the questions of one file, for lm-eval.

    Args:
        longmemeval: file of the data set, such as `longmemeval_s.json`, `lm_eval.task_settings.longmemeval`.
        settings: those of other tasks.
    Raises:
        FileNotFoundError: the file is not there.
    """
    if longmemeval is None or not Path(longmemeval).is_file():
        raise FileNotFoundError(
            f"longmemeval: there is no {longmemeval or 'file'}; give +lm_eval.task_settings.longmemeval=FILE, "
            "longmemeval_s.json of the hub's xiaowu0162/longmemeval"
        )
    rows = json.loads(Path(longmemeval).read_text(encoding="utf-8"))
    found = [
        {
            "context": BEFORE + history_of(row),
            "question": f"\nCurrent Date: {row['question_date']}\nQuestion: {row['question']}\nAnswer:",
            "answer": str(row["answer"]),
            "question_id": row["question_id"],
            "question_type": row["question_type"],
        }
        for row in rows
    ]
    return {"test": Dataset.from_list(found)}


def history_of(row: dict[str, Any]) -> str:
    """Write all sessions, oldest first, as the paper's JSON format does."""
    sessions = sorted(zip(row["haystack_dates"], row["haystack_sessions"], strict=True), key=lambda session: session[0])
    found = ""
    for number, (date, turns) in enumerate(sessions, start=1):
        plain = [{name: value for name, value in turn.items() if name != "has_answer"} for turn in turns]
        found += f"\n### Session {number}:\nSession Date: {date}\nSession Content:\n\n{json.dumps(plain)}\n"
    return found


def process_results(document: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return whether an answer has the words of the right one, in order, for lm-eval."""
    given, right = (" ".join(re.findall(r"\w+", text.lower())) for text in (results[0], document["answer"]))
    return {"holds_answer": float(f" {right} " in f" {given} ")}
