"""What a compressed cache is asked to do: predict text, or find again what stood far back.

Read in this order: `base.py` (what a task is) -> `text_loss.py` (predict text) -> `asking.py` (ask behind a compressed
prompt; with random tokens) -> `prompts.py` (prompts of text, conversations) -> `retrieval.py` (ask about text) ->
`facts.py` (many questions to one context) -> `inside.py` (no question: what is left).
"""

from dmc.results.tasks.asking import Recall
from dmc.results.tasks.base import Part, Sample, SampleResult, Task, by_coordinates, split_of_text
from dmc.results.tasks.facts import FactRecall
from dmc.results.tasks.inside import Inside
from dmc.results.tasks.retrieval import KeyValuePairs, MultiTurnRecall, Needle, TwoStageRetrieval
from dmc.results.tasks.text_loss import TextLoss

__all__ = [
    "FactRecall",
    "Inside",
    "KeyValuePairs",
    "MultiTurnRecall",
    "Needle",
    "Part",
    "Recall",
    "Sample",
    "SampleResult",
    "Task",
    "TextLoss",
    "TwoStageRetrieval",
    "by_coordinates",
    "split_of_text",
]
