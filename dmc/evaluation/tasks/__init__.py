"""What a compressed cache is asked to do: predict text, or find again what stood far back.

`base.py` says what a task is. With random tokens: `recall.py`. With text: `text_loss.py`, and, on `text_recall.py`,
`needle.py` (also passkey), `key_value.py`, `two_stage.py` and `turns.py`. `asking.py` feeds what comes behind a prompt
when the cache has compressed it.
"""

from dmc.evaluation.tasks.base import Part, Sample, SampleResult, Task, by_place, split_of_text
from dmc.evaluation.tasks.key_value import KeyValuePairs
from dmc.evaluation.tasks.needle import Needle
from dmc.evaluation.tasks.recall import Recall
from dmc.evaluation.tasks.text_loss import TextLoss, mean_loss
from dmc.evaluation.tasks.turns import MultiTurnRecall, Turns
from dmc.evaluation.tasks.two_stage import TwoStageRetrieval

__all__ = [
    "KeyValuePairs",
    "MultiTurnRecall",
    "Needle",
    "Part",
    "Recall",
    "Sample",
    "SampleResult",
    "Task",
    "TextLoss",
    "Turns",
    "TwoStageRetrieval",
    "by_place",
    "mean_loss",
    "split_of_text",
]
