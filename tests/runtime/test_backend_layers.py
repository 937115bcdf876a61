"""Layers that the CPU backend runs in fewer calls compute what the model's own do, in every family."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from covering import cover
from tiny_families import stock_of

from dmc import Engine, SamplingParams, retrofit
from dmc.compression import CompressionConfig
from dmc.kernels import cpu
from dmc.kernels.cpu_build import load_library
from dmc.models import FAMILIES

WIDE = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 96, "moe_intermediate_size": 32}
WHOLE = {"cwm", "llama", "ministral", "mistral", "qwen2"}
"""Stock families whose layers run in one call; with gates also SmolLM3's layers that turn."""
PROMPTS = [[3, 5, 7, 11, 13, 17, 19, 23, 29], [2, 4, 6], [31] * 14]
GREEDY = SamplingParams(max_new_tokens=14, temperature=0.0, ignore_eos=True)
GATES = {
    "drop, delay 4": {"action": "drop", "delay": 4},
    "merge": {},
    "merge, exact, delay 2": {"window_size": None, "delay": 2},
    "merge, uniform": {"weighting": "uniform"},
}

pytestmark = pytest.mark.skipif(load_library() is None, reason="needs a C++ compiler")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count calls of the backend."""
    counted: Counter[str] = Counter()
    for name in ("decode_layer", "linear_together", "gated_mlp", "rms_norm", "rotate", "linear"):

        def counting(*given: Any, plain: Any = getattr(cpu, name), name: str = name, **named: Any) -> Any:
            counted[name] += 1
            return plain(*given, **named)

        monkeypatch.setattr(cpu, name, counting)
    return counted


def check_as_reference(model: Any, **options: Any) -> None:
    """Compare greedy tokens, and what the model thinks of them, with those of torch's layers."""
    found, expected = (
        Engine(model, kernels=kernels, **options).generate(PROMPTS, GREEDY) for kernels in ("cpu", "reference")
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.token_ids == theirs.token_ids
        torch.testing.assert_close(torch.tensor(mine.logprobs), torch.tensor(theirs.logprobs), rtol=0, atol=2e-4)
        assert torch.equal(mine.stats.slots, theirs.stats.slots)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_computes_what_it_does_with_torch(family: str, calls: Counter[str]) -> None:
    check_as_reference(stock_of(family, **WIDE))
    assert (calls["decode_layer"] > 0) == (family in WHOLE)


@pytest.mark.parametrize(("gates", "kv_cache_dtype"), cover(tuple(GATES), ("auto", "int8")))
def test_gates_decide_as_in_torch(gates: str, kv_cache_dtype: str, calls: Counter[str]) -> None:
    check_as_reference(hidden_gates(**GATES[gates]), kv_cache_dtype=kv_cache_dtype)
    assert calls["decode_layer"]


@pytest.mark.parametrize("family", sorted(WHOLE - {"llama"} | {"smollm3", "qwen3", "olmo2"}))
def test_families_with_gates_compute_what_they_do_with_torch(family: str, calls: Counter[str]) -> None:
    check_as_reference(hidden_gates(family, action="drop", delay=4))
    assert (calls["decode_layer"] > 0) == (family in WHOLE | {"smollm3"})


def hidden_gates(family: str = "llama", **settings: Any) -> Any:
    """Give a tiny model gates that read its hidden state, and decide both ways."""
    config = CompressionConfig(gate_input="hidden", decision_offset=0.1, omega_offset=0.2, **settings)
    model = retrofit(copy.deepcopy(stock_of(family, **WIDE)), config)
    generator = torch.Generator().manual_seed(7)
    for adapter in model.adapters():
        adapter.weight.data.normal_(0, 0.15, generator=generator)
    return model.eval()


@pytest.mark.parametrize("gate_input", ["neuron", "both", "query"])
def test_other_gates_keep_their_layers(gate_input: str, calls: Counter[str]) -> None:
    config = CompressionConfig(gate_input=gate_input, decision_offset=0.1, omega_offset=0.2)
    check_as_reference(retrofit(copy.deepcopy(stock_of("llama", **WIDE)), config).eval())
    assert not calls["decode_layer"] and calls["linear_together"]


def test_bfloat16_layers_stay_within_its_rounding() -> None:
    model = copy.deepcopy(stock_of("llama", **WIDE)).bfloat16()
    one = SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True)
    found, expected = (Engine(model, kernels=kernels).generate(PROMPTS, one) for kernels in ("cpu", "reference"))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(mine.logprobs), torch.tensor(theirs.logprobs), rtol=0, atol=0.1)


def test_a_layer_that_is_watched_or_changed_is_followed(calls: Counter[str]) -> None:
    model, seen = copy.deepcopy(stock_of("llama", **WIDE)), []
    engine = Engine(model, kernels="cpu")
    first = engine.generate(PROMPTS, GREEDY)
    hook = model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: seen.append(1))
    calls.clear()
    again = engine.generate(PROMPTS, GREEDY)
    assert len(seen) == GREEDY.max_new_tokens and calls["decode_layer"] == GREEDY.max_new_tokens - 1
    assert [one.token_ids for one in again] == [one.token_ids for one in first]
    hook.remove()
    before = model.model.layers[1].self_attn.k_proj.register_forward_pre_hook(lambda _, given: (given[0] * 2,))
    check_as_reference(model)
    before.remove()
    layer = model.model.layers[0]
    layer.mlp.down_proj.weight = torch.nn.Parameter(layer.mlp.down_proj.weight.flip(0))
    layer.self_attn.q_proj.weight.data.mul_(0.5)
    changed = engine.generate(PROMPTS, GREEDY)
    expected = Engine(model, kernels="reference").generate(PROMPTS, GREEDY)
    assert [one.token_ids for one in changed] == [one.token_ids for one in expected]


def test_a_step_of_llama_calls_the_backend_once_a_layer(calls: Counter[str]) -> None:
    """Beside it come the last norm and the logits: two calls more."""
    for model in (stock_of("llama", **WIDE), hidden_gates(action="drop", delay=4)):
        engine = Engine(model, kernels="cpu")
        request = engine.submit(PROMPTS[0], GREEDY)
        while not request.logprobs:
            engine.step()
        calls.clear()
        engine.step()
        assert calls == {"decode_layer": model.config.num_hidden_layers, "rms_norm": 1, "linear": 1}


def test_more_sequences_than_a_call_takes_are_served_by_torch(calls: Counter[str]) -> None:
    prompts = [[token, 2, 3] for token in range(17)]
    few = SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True)
    found = Engine(stock_of("llama", **WIDE), kernels="cpu").generate(prompts, few)
    assert not calls["decode_layer"]
    alone = Engine(stock_of("llama", **WIDE), kernels="cpu").generate(prompts[:2], few)
    assert [one.token_ids for one in alone] == [one.token_ids for one in found[:2]]
