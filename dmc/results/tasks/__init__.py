"""What a compressed cache is asked to do: predict text, or find again what stood far back.

`base.py` says what a task is. With random tokens: `recall.py`. With text: `text_loss.py`, and, on `text_recall.py`,
`needle.py` (also passkey), `key_value.py`, `two_stage.py` and `turns.py`. `asking.py` feeds what comes behind a prompt
when the cache has compressed it.
"""

from dmc.results.tasks.base import Part, Sample, SampleResult, Task, by_place, split_of_text
from dmc.results.tasks.key_value import KeyValuePairs
from dmc.results.tasks.needle import Needle
from dmc.results.tasks.recall import Recall
from dmc.results.tasks.text_loss import TextLoss, mean_loss
from dmc.results.tasks.turns import MultiTurnRecall, Turns
from dmc.results.tasks.two_stage import TwoStageRetrieval

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
