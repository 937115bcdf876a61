"""Training data: sources of documents, packed token arrays, and an order that resumes anywhere.

Read in this order: `files.py`, `text.py`, `stdlib.py` or `packages.py` (documents) -> `tokenizer.py` ->
`token_cache.py` (tokenised once, in shards) -> `token_shards.py` (read as one array) -> `packing.py` (sequences) ->
`corpus.py` (all of that in one call) -> `blend.py` -> `order.py` (which sequence at which position) -> `report.py` (how
much there is of what). `streaming.py` and `stream_loader.py` do all of it on the fly.
"""

from dmc.data.blend import Blend
from dmc.data.corpus import build_packed
from dmc.data.order import OrderedDataset, ResumableOrder
from dmc.data.packages import PackageSource
from dmc.data.packing import PackedTokens, pack_documents
from dmc.data.report import SourceReport, format_report, report_packed, report_streams, write_report
from dmc.data.stdlib import StandardLibrarySource, stdlib_documents
from dmc.data.stream_loader import StreamLoader
from dmc.data.synthetic import RecallSequences
from dmc.data.text import TextSource
from dmc.data.token_cache import DocumentSource
from dmc.data.token_shards import TokenShards
from dmc.data.tokenizer import Framing, framing_of, train_tokenizer

__all__ = [
    "Blend",
    "DocumentSource",
    "Framing",
    "OrderedDataset",
    "PackageSource",
    "PackedTokens",
    "RecallSequences",
    "ResumableOrder",
    "SourceReport",
    "StandardLibrarySource",
    "StreamLoader",
    "TextSource",
    "TokenShards",
    "build_packed",
    "format_report",
    "framing_of",
    "pack_documents",
    "report_packed",
    "report_streams",
    "stdlib_documents",
    "train_tokenizer",
    "write_report",
]
