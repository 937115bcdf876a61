"""Method by family: each pair runs, or is refused when the engine is built; there is no third."""

import copy
import inspect
import warnings
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from evicting import write_scorer
from runtime.test_recurrent import recurrent
from runtime.test_stock_attention import MLA, build
from tiny_families import OF_FAMILY, compressed_of, stock_of, texts

from dmc import Engine, SamplingParams, policies, retrofit
from dmc.budget import Budget
from dmc.compression import CompressionConfig
from dmc.models import FAMILIES

BUDGET, FOLDER = Budget(tokens=10), TemporaryDirectory()
GREEDY = SamplingParams(max_new_tokens=4, temperature=0, ignore_eos=True)
RUNS, REFUSED = "runs", "refused"
OPTIONS = {
    "ExpectedAttention": {"future": 20},
    "KVzip": {"sinks": 2, "chunk": 11, "lead": 3, "instruction": [5, 9]},
    "AttentionMatching": {"sinks": 2, "chunk": 11, "queries": 20, "instruction": [5, 9]},
    "Quest": {"page_size": 4},
    "InfLLM": {"block_size": 4, "representatives": 2, "initial": 2, "local": 6, "chunk": 8},
    "OmniKV": {"filter_layers": (0,)},
    "Marked": {"markers": [3, 20]},
}
BASES = ("CachePolicy", "EvictionPolicy", "ReadingPolicy")
KINDS = {
    name: kind
    for name in policies.__all__
    if inspect.isclass(kind := getattr(policies, name)) and issubclass(kind, policies.CachePolicy) and name not in BASES
}
GATES = {"gates that merge": {}, "gates that drop": {"action": "drop", "delay": 4}}
METHODS = ["full cache", *KINDS, "StreamingLLM, rerotate", "SnapKV at 8 bits", *GATES]
METHODS += [f"gates that merge, {name}" for name in ("SnapKV", "H2O", "ExpectedAttention", "InfLLM")]
OTHERS = {
    "olmo_hybrid": lambda: recurrent("olmo_hybrid"),
    "deepseek_v3": lambda: build("deepseek_v3", **MLA),
    "gemma2": lambda: build("gemma2"),
}
"""Stock models beside the table of families; the last two attend in a way of their own."""
HAS_NO_CACHE_OF_OURS = ("deepseek_v3", "gemma2")
ONE_FULL_LAYER = [family for family, values in OF_FAMILY.items() if len({*values.get("layer_types", ())}) == 2]


@cache
def stock(family):
    return OTHERS[family]() if family in OTHERS else stock_of(family)


@cache
def scorer(num_layers):
    return write_scorer(Path(FOLDER.name) / str(num_layers), num_layers=num_layers)


def policy_of(method, num_layers):
    """The policy of a row, and options of the engine."""
    name, _, more = method.removeprefix("gates that merge, ").partition(", ")
    name, _, bits = name.partition(" at ")
    options = {**OPTIONS.get(name, {}), **({"rerotate": True} if more else {})}
    if name == "KVpop":
        options["scorer"] = scorer(num_layers)
    return KINDS[name](budget=BUDGET, **options) if name in KINDS else None, {"kv_cache_dtype": "int8"} if bits else {}


def expected(method, family):
    """What the table says of a pair."""
    if family in HAS_NO_CACHE_OF_OURS:
        return REFUSED
    if method.startswith("gates"):
        acts_while_generating = method.endswith(("H2O", "ExpectedAttention", "InfLLM"))
        return REFUSED if acts_while_generating or family not in FAMILIES else RUNS
    return RUNS


def outcome(method, family):
    """Build an engine, which may refuse, and let it answer two prompts at a time, which may do neither."""
    prompts, gates = texts(40, 11), GATES.get(method, {} if method.startswith("gates") else None)
    try:
        if gates is not None and family in FAMILIES:
            model = compressed_of(family, **gates)
        else:
            model = copy.deepcopy(stock(family))
            model = model if gates is None else retrofit(model, CompressionConfig(**gates))
        policy, options = policy_of(method, 1 if family in ONE_FULL_LAYER else 2)
        engine = Engine(model, policy=policy, **options)
    except (ValueError, NotImplementedError) as error:
        return REFUSED if 20 < len(str(error)) < 500 and "\n" not in str(error) else str(error)
    alone = [engine.generate([prompt], GREEDY)[0] for prompt in prompts]
    for generation, own in zip(engine.generate(prompts, GREEDY), alone, strict=True):
        assert generation.finish_reason == "length" and generation.token_ids == own.token_ids
    evicts = isinstance(policy, policies.EvictionPolicy) and not policy.adapts_layers
    assert not evicts or alone[0].stats.slots.double().mean() <= 10 + 4, method
    assert engine.blocks_in_use == 0
    return RUNS


FAMILY_NAMES = [*sorted(FAMILIES), *OTHERS]
ONE_EACH = [(METHODS[index % len(METHODS)], family) for index, family in enumerate(FAMILY_NAMES)]
"""Every family once, and every method."""


@pytest.mark.parametrize(("method", "family"), ONE_EACH)
@pytest.mark.filterwarnings("ignore")
def test_a_family_with_one_of_the_methods(method, family):
    assert outcome(method, family) == expected(method, family)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_method_runs_on_a_family_or_is_refused_when_the_engine_is_built(family):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {method: outcome(method, family) for method in METHODS}
    assert found == {method: expected(method, family) for method in METHODS}


def test_every_policy_and_every_family_has_a_row():
    methods, families = map(set, zip(*ONE_EACH, strict=True))
    assert (methods, families) == ({*METHODS}, {*FAMILIES, *OTHERS})
