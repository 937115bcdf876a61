"""Slow float64 answers to what `dmc.policies` computes fast; written from the papers, sharing no code with `dmc`."""

from oracles.decoder import Decoder

from .agnostic import AttentionMatching, ExpectedAttention, KVzip
from .base import Trace as Trace
from .cake import CAKE
from .d2o import D2O
from .h2o import H2O, VATP, CaM
from .infllm import InfLLM
from .kvpop import KVpop
from .lava import LAVa
from .omnikv import OmniKV
from .quest import Quest
from .roco import RoCo
from .snapkv import AdaKV, PyramidKV, SnapKV
from .tova import TOVA
from .window import LocalWindow, StreamingLLM

EVICTING = (LocalWindow, StreamingLLM, H2O, TOVA, SnapKV, PyramidKV, AdaKV, CAKE, VATP, RoCo, CaM, LAVa, D2O)
EVICTING += (ExpectedAttention, KVzip, AttentionMatching, KVpop)
READING = (OmniKV, Quest, InfLLM)
METHODS = {method.__name__: method for method in EVICTING + READING}


def run(model, method, prompt, continuation, budget, protect=0.0, **options):
    """Teacher-force a continuation after a prompt with a compressed cache.

    Args:
        model: stock causal LM of transformers (Llama, Mistral, Qwen2, Qwen3).
        method: name of a class of `dmc.policies`.
        prompt: its token ids.
        continuation: token ids; prompt + continuation[:-1] is fed.
        budget: {"ratio": r} or {"tokens": n}, entries per KV head.
        protect: share of the budget reserved at each end of the prompt.
        options: keywords of the method.
    """
    oracle = METHODS[method](budget, **options)
    oracle.protect = protect
    return oracle.run(Decoder(model), prompt, continuation)
