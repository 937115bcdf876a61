"""Tasks that measure a compressed cache: predict text, or retrieve tokens from far back.

Read in this order: `base.py` (the base class of a task) -> `text_loss.py` (predict text) -> `forking.py` (a context is
read once for all of its questions) -> `asking.py` (questions after a compressed prompt, conversations) -> `prompts.py`
(prompts of text) -> `retrieval.py` (questions about text) -> `ruler.py` (RULER's own) -> `agreement.py` (the full
cache's answers) -> `fact_recall.py` (many questions about one context) -> `voting.py` (several answers of a prompt) ->
`chain_reasoning.py` (problems solved step by step) -> `cache_analysis.py` (no question: the entries that are left) ->
`instructions.py` (which of several instructions are obeyed, and what is left of them).
"""

from dmc.results.tasks.agreement import Agreement
from dmc.results.tasks.base import Breakdown, Conditions, Sample, SampleResult, Task, by_coordinates, split_of_text
from dmc.results.tasks.cache_analysis import CacheAnalysis
from dmc.results.tasks.chain_reasoning import ChainReasoning
from dmc.results.tasks.fact_recall import FactRecall
from dmc.results.tasks.instructions import Instructions, SystemPrompt
from dmc.results.tasks.retrieval import KeyValuePairs, MultiTurnRecall, Needle, TwoStageRetrieval
from dmc.results.tasks.ruler import CommonWords, FrequentWords, RulerNeedles, VariableTracking
from dmc.results.tasks.text_loss import TextLoss

__all__ = [
    "Agreement",
    "Breakdown",
    "CacheAnalysis",
    "ChainReasoning",
    "CommonWords",
    "Conditions",
    "FactRecall",
    "FrequentWords",
    "Instructions",
    "KeyValuePairs",
    "MultiTurnRecall",
    "Needle",
    "RulerNeedles",
    "Sample",
    "SampleResult",
    "SystemPrompt",
    "Task",
    "TextLoss",
    "TwoStageRetrieval",
    "VariableTracking",
    "by_coordinates",
    "split_of_text",
]
