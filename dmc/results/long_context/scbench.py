"""SCBench (arXiv 2412.10319): several questions to one long context, each asked on its own, with the paper's scores.

Without the four sets whose scores need further packages (summaries, Chinese, code of repositories).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

BOOK = "Read the book and answer the question."
BEFORE = {
    "scbench_kv": "Extract the value corresponding to the specified key in the JSON object below.\n\n",
    "scbench_qa_eng": f"{BOOK} Be very concise in your answer.\n\n",
    "scbench_choice_eng": f"{BOOK}\n\n",
}
"""Instructions before a context."""


def documents(name: str, scbench: str | None = None, **settings: Any) -> dict[str, Dataset]:
    """Return a document for each question of one set, for lm-eval.

    Args:
        name: name of the set, `scbench_kv`.
        scbench: folder with `NAME.jsonl` (`data/` of the hub's microsoft/SCBench), `lm_eval.task_settings.scbench`.
        settings: those of other tasks.
    Raises:
        FileNotFoundError: the file is not there.
    """
    file = Path(scbench or "") / f"{name}.jsonl"
    if scbench is None or not file.is_file():
        raise FileNotFoundError(
            f"scbench: there is no {file}; give +lm_eval.task_settings.scbench=DIR, the folder `data` of the hub's "
            "microsoft/SCBench"
        )
    found = []
    with file.open(encoding="utf-8") as lines:
        for row in map(json.loads, filter(str.strip, lines)):
            context, turns = row["context"] if "context" in row else row["input"], row["multi_turns"]
            before = f"{turns[0]['input']}\n\n" if name == "scbench_mf" else BEFORE.get(name, "")
            for turn in turns:
                question = "\n\n" + question_of(name, turn)
                answer = json.dumps(turn["answer"])  # text, a list or a number
                found.append({"context": before + context, "question": question, "answer": answer, "set": name})
    return {"test": Dataset.from_list(found)}


def question_of(name: str, turn: dict[str, Any]) -> str:
    """Write a turn as the data set's prompts do."""
    text = turn["input"]
    if name == "scbench_qa_eng":
        return f"Question: {text}\nAnswer:"
    if name == "scbench_choice_eng":
        choices = "".join(f"{letter}. {choice}\n" for letter, choice in zip("ABCD", turn["options"], strict=True))
        return f"Question: {text}\n{choices}\nThe the correct answer is"  # the data set's own words
    if name == "scbench_mf":
        asked = re.findall("The .+ is", text)[0].lower().removesuffix(" is")
        return f"What is {asked}?\n\n{text}"
    return str(text)


def process_results(document: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return the score of one answer, for lm-eval."""
    return {"score": float(SCORES[document["set"]](results[0], json.loads(document["answer"])))}


def _holds(prediction: str, label: Any) -> float:
    return float(label in prediction)


def _holds_share(prediction: str, label: Any) -> float:
    return round(sum(item.lower() in prediction.lower() for item in label) / len(label), 2)


def _holds_one(prediction: str, label: Any) -> float:
    return float(any(item.upper() in prediction.upper() for item in label))


def _is_number(prediction: str, label: Any) -> float:
    wanted = label[0] if isinstance(label, list) else label
    found = re.search(r"\d+\.\d+|\d+", prediction)
    if found is None:
        return 0.0
    number = float(found.group())
    return float((int(number) if isinstance(wanted, int) else number) == wanted)


def _is_choice(prediction: str, label: Any) -> float:
    text = prediction.strip()
    if not text or text[0] in "ABCD":
        return float(bool(text) and text[0] in label)
    if text in label:
        return 1.0
    text = re.sub(" +", " ", re.sub("[\n\"'.,?!{}]", " ", text))
    for prefix in ("answer is:", "answer:", "answer is", "option is"):
        if prefix in text:
            after = text.partition(prefix)[2][1:]
            return float(any(after.startswith(item) for item in label))
    letters = [word for word in text.split() if word in "ABCD"]
    return float(bool(letters) and letters[0] in label)


SCORES: dict[str, Callable[[str, Any], float]] = {
    **{"scbench_kv": _holds, "scbench_prefix_suffix": _holds, "scbench_vt": _holds_share},
    **{"scbench_qa_eng": _holds_one, "scbench_many_shot": _holds_one},
    **{"scbench_choice_eng": _is_choice, "scbench_mf": _is_number},
}
"""Score of each set; a label is text, a list, or a number."""
