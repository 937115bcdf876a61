"""Training data: sources of documents, packed token arrays, and an order that resumes anywhere.

Read in this order: `text.py` or `stdlib.py` (documents) -> `tokenizer.py` -> `corpus.py` (cached token arrays) ->
`packing.py` (sequences) -> `blend.py` -> `order.py` (which sequence at which position). `streaming.py` does all
of it on the fly.
"""

from dmc.data.blend import Blend
from dmc.data.corpus import build_packed
from dmc.data.order import OrderedDataset, ResumableOrder
from dmc.data.packing import PackedTokens, pack_documents
from dmc.data.ranked_loader import RankedLoader
from dmc.data.stdlib import StandardLibrarySource, stdlib_documents
from dmc.data.streaming import StreamingPacked
from dmc.data.synthetic import RecallSequences
from dmc.data.text import TextSource, open_stream
from dmc.data.token_cache import DocumentSource
from dmc.data.token_shards import TokenShards
from dmc.data.tokenizer import train_tokenizer

__all__ = [
    "Blend",
    "DocumentSource",
    "OrderedDataset",
    "PackedTokens",
    "RankedLoader",
    "RecallSequences",
    "ResumableOrder",
    "StandardLibrarySource",
    "StreamingPacked",
    "TextSource",
    "TokenShards",
    "build_packed",
    "open_stream",
    "pack_documents",
    "stdlib_documents",
    "train_tokenizer",
]
