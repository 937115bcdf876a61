"""Training-free methods: which cache entries they keep, or read, at run time. One file is one method.

base.py             the interface of a policy: what it sees, returns and declares, and how to add one
layer_attention.py  an attention layer without a policy: append the tokens, attend to all entries
eviction.py         methods that score entries and evict some, and their execution
scores.py           pooling of scores; budgets.py and merging.py: shares of layers and heads, fate of evicted entries
repetition.py       methods that see how the model repeats the text: kvzip.py, attention_matching.py
kvpop.py            one that is learned, with the scorer in delayed_scorer.py
reading.py          methods that hold everything and read a part: omnikv.py, quest.py, infllm.py
placement.py        entries of such a method on the device, or in the host's memory
"""

from dmc.policies.adakv import AdaKV
from dmc.policies.attention_matching import AttentionMatching
from dmc.policies.base import CachePolicy, Entries, Rewrite
from dmc.policies.cake import CAKE
from dmc.policies.cam import CaM
from dmc.policies.controls import Marked, Random
from dmc.policies.d2o import D2O
from dmc.policies.eviction import EvictionPolicy
from dmc.policies.expected_attention import ExpectedAttention
from dmc.policies.h2o import H2O
from dmc.policies.infllm import InfLLM
from dmc.policies.kvpop import KVpop
from dmc.policies.kvzip import KVzip
from dmc.policies.lava import LAVa
from dmc.policies.omnikv import OmniKV
from dmc.policies.pyramidkv import PyramidKV
from dmc.policies.quest import Quest
from dmc.policies.reading import ReadingPolicy
from dmc.policies.roco import RoCo
from dmc.policies.snapkv import SnapKV
from dmc.policies.tova import TOVA
from dmc.policies.vatp import VATP
from dmc.policies.window import LocalWindow, StreamingLLM

__all__ = [
    "CAKE",
    "D2O",
    "H2O",
    "TOVA",
    "VATP",
    "AdaKV",
    "AttentionMatching",
    "CaM",
    "CachePolicy",
    "Entries",
    "EvictionPolicy",
    "ExpectedAttention",
    "InfLLM",
    "KVpop",
    "KVzip",
    "LAVa",
    "LocalWindow",
    "Marked",
    "OmniKV",
    "PyramidKV",
    "Quest",
    "Random",
    "ReadingPolicy",
    "Rewrite",
    "RoCo",
    "SnapKV",
    "StreamingLLM",
]
