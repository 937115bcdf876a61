"""IFEval (arXiv:2311.07911) by place: is the first, a middle or the last instruction of a prompt obeyed?

Prompts with several instructions, by the checks of lm-eval's own `ifeval`: a cache may lose some instructions
and keep others (arXiv:2510.00231).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from datasets import Dataset


def documents(ifeval: str | None = None, **settings: Any) -> dict[str, Dataset]:
    """Return the prompts with at least two instructions of one file, for lm-eval.

    Args:
        ifeval: the data set's file, `lm_eval.task_settings.ifeval`.
        settings: those of other tasks.
    Raises:
        FileNotFoundError: the file is not there.
    """
    if ifeval is None or not Path(ifeval).is_file():
        raise FileNotFoundError(
            f"ifeval: there is no {ifeval or 'file'}; give +lm_eval.task_settings.ifeval=FILE, ifeval_input_data.jsonl "
            "of the hub's google/IFEval"
        )
    rows = [json.loads(line) for line in Path(ifeval).read_text(encoding="utf-8").splitlines() if line.strip()]
    return {"test": Dataset.from_list([row for row in rows if len(row["instruction_id_list"]) > 1])}


def process_results(document: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return which instructions an answer obeys, for lm-eval; needs the extra `ifeval` of lm-eval."""
    from lm_eval.tasks.ifeval.utils import InputExample, test_instruction_following_strict

    names = ("key", "instruction_id_list", "prompt", "kwargs")
    example = InputExample(**{name: document[name] for name in names})
    return by_place(test_instruction_following_strict(example, results[0]).follow_instruction_list)


def by_place(followed: Sequence[bool]) -> dict[str, float]:
    """Return the share of instructions that are obeyed, the first, the last, and if there are any those between."""
    found = {"obeyed": fmean(followed), "first": float(followed[0]), "last": float(followed[-1])}
    return found | ({"middle": fmean(followed[1:-1])} if len(followed) > 2 else {})
