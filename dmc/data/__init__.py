"""Training data: sources of documents, packed tokens, and an order that resumes anywhere.

Read in this order: `sources.py` and `text.py`, `code.py`, `prose.py` or `megatron.py` (documents), `lists.py` and
`chains.py` (`drawn.py`) -> `tokenizer.py`, `encoding.py` (their tokens) -> `cache.py` (all of a corpus, once, through
`datasets`) -> `packing.py` (read at any window, in sequences) -> `facts.py` (what is written into them) -> `order.py`
(which sequence of which source at which position). `streaming.py` does all of it on the fly; `hub.py` reads from the
hub once.
"""

from dmc.data.cache import build_packed, check_text
from dmc.data.chains import ChainSource, Problem, answer_of, draw_problem
from dmc.data.code import PackageSource, StandardLibrarySource
from dmc.data.facts import FactSequences, FactWriter
from dmc.data.hub import local_copy, once
from dmc.data.lists import ListSource
from dmc.data.megatron import MegatronSource
from dmc.data.order import Blend, Positions, Shuffled
from dmc.data.packing import PackedTokens
from dmc.data.prose import ProseSource
from dmc.data.sources import DocumentSource
from dmc.data.streaming import StreamLoader
from dmc.data.text import TextSource
from dmc.data.tokenizer import Framing, framing_of, train_tokenizer

__all__ = [
    "Blend",
    "ChainSource",
    "DocumentSource",
    "FactSequences",
    "FactWriter",
    "Framing",
    "ListSource",
    "MegatronSource",
    "PackageSource",
    "PackedTokens",
    "Positions",
    "Problem",
    "ProseSource",
    "Shuffled",
    "StandardLibrarySource",
    "StreamLoader",
    "TextSource",
    "answer_of",
    "build_packed",
    "check_text",
    "draw_problem",
    "framing_of",
    "local_copy",
    "once",
    "train_tokenizer",
]
