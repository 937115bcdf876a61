"""Stock models of many families: served as they are, or refused; never with another attention than their own."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dmc import Engine, SamplingParams
from dmc.kernels import cpu

WINDOW, CONTEXT = 8, 64
SMALL = {
    "vocab_size": 83,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SMALL_PHI = {"hidden_size": 64}  # whose heads are always as large as hidden_size / num_attention_heads
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FULL = ["full_attention", "full_attention"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
THETA = {"rope_theta": 100.0}


def build(family: str, **changes: Any) -> Any:
    """Build a tiny model of a family with random weights, large enough that attention is not flat."""
    config = AutoConfig.for_model(family, **{**SMALL, **changes})
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
    return model.eval()


def difference(model: Any, engine: Engine) -> float:
    """Compare log-probabilities of two texts that share passes, in chunks, with the model's own; the largest gap."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(83, (length,), generator=generator).tolist() for length in (40, 23)]
    served = engine.score([text[:3] for text in texts], [text[3:] for text in texts])
    gaps = []
    for text, scored in zip(texts, served, strict=True):
        with torch.no_grad():
            parallel = model(torch.tensor([text]), use_cache=False).logits[0, 2:-1].log_softmax(-1)
        gaps.append(float((scored - parallel).abs().max()))
    return max(gaps)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0} | THETA}),
        ("llama", {"rope_parameters": YARN | THETA}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": CONTEXT}),
        ("mixtral", {"sliding_window": None, **EXPERTS}),
        ("phi3", {"sliding_window": CONTEXT + 1, **SMALL_PHI}),
        ("starcoder2", {"sliding_window": None, **SMALL_PHI}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": WINDOW}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
        ("gemma2", {"attn_logit_softcapping": None, "layer_types": FULL, "sliding_window": WINDOW}),
        ("gemma3_text", {"layer_types": FULL, "sliding_window": WINDOW}),
        ("llama4_text", {"attention_chunk_size": CONTEXT, "num_local_experts": 2, "intermediate_size_mlp": 96}),
        ("mistral", {"sliding_window": CONTEXT - 1}),
        ("mixtral", {"sliding_window": WINDOW, **EXPERTS}),
        ("phi3", {"sliding_window": WINDOW, **SMALL_PHI}),
        ("starcoder2", {"sliding_window": WINDOW, **SMALL_PHI}),
        ("ministral3", {"sliding_window": WINDOW}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
        ("gpt_oss", {"layer_types": FULL, **EXPERTS}),
        ("smollm3", {}),
        ("cohere", {}),
        ("olmo2", {}),
        ("granite", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_families_with_full_attention_or_windows_are_served_as_they_are(family: str, changes: dict[str, Any]) -> None:
    model = build(family, **changes)
    before = model.config._attn_implementation
    engine = Engine(model, prefill_chunk_size=16)
    assert difference(model, engine) < 1e-4
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma2", {"layer_types": FULL}, "attn_logit_softcapping=50.0"),
        (
            "llama4_text",
            {"attention_chunk_size": WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 96},
            "layer 0 of this llama4_text model has a chunk of 8 tokens",
        ),
        ("deepseek_v3", {**MLA, "num_key_value_heads": 4, "first_k_dense_replace": 2}, "kv_lora_rank=16"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0} | THETA}, "rope_type='dynamic' changes"),
        (
            "phi3",
            {
                **SMALL_PHI,
                "sliding_window": None,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "original_max_position_embeddings": 16,
                }
                | THETA,
            },
            "rope_type='longrope' changes",
        ),
        ("falcon_h1", {}, "layer 0 of this falcon_h1 model is hybrid"),
        ("bloom", {}, "layer 0 of this bloom model has its own attention"),
        ("bloom", {"num_key_value_heads": None}, "this bloom model has no num_key_value_heads"),
        ("gpt2", {"num_key_value_heads": None}, "this gpt2 model has no num_key_value_heads"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_families_with_another_attention_are_refused_at_once(family: str, changes: dict, reason: str) -> None:
    model = build(family, **changes)
    with pytest.raises(NotImplementedError, match=reason):
        Engine(model)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("diffllama", {}, "layer 0 asks the paged cache where layer 1 was due"),
        ("doge", {"keep_window_size": 4}, "layer 0 .*attention_mask"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_attention_that_no_configuration_tells_of_is_refused_at_once_too(
    family: str, changes: dict, reason: str
) -> None:
    model = build(family, **changes)
    with pytest.raises(NotImplementedError, match=reason):
        Engine(model)


@pytest.mark.parametrize(
    ("name", "value"),
    [("softcap", 30.0), ("sliding_window", WINDOW), ("is_causal", False), ("novel", 1)],
    ids=str,
)
def test_keywords_that_change_attention_are_refused_and_not_swallowed(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    model = build("llama")
    engine = Engine(model)
    plain = modeling_llama.ALL_ATTENTION_FUNCTIONS.get_interface

    def with_keyword(*arguments: Any) -> Any:
        function = plain(*arguments)
        return lambda *given, **keywords: function(*given, **keywords, **{name: value})

    monkeypatch.setattr(modeling_llama.ALL_ATTENTION_FUNCTIONS, "get_interface", with_keyword, raising=False)
    with pytest.raises(NotImplementedError, match=f"layer 0 of this llama model .*{name}="):
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=2))


def test_no_mask_is_built_where_sequences_share_a_pass() -> None:
    engine = Engine(build("llama"))
    sizes: list[int] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.bool:  # of N tokens a mask has N * N
                sizes.append(out.numel())
            return out

    with Watch():
        engine.generate([[1, 2, 3] * 30, [4, 5] * 40], SamplingParams(max_new_tokens=2, temperature=0))
    assert max(sizes, default=0) < 170**2 / 10


def test_an_engine_leaves_no_trace_in_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers, attention and `forward`s stay the model's own, while a pass runs and after one that failed."""
    model, calls = build("llama", attn_implementation="eager"), []
    before = [dict(module.__dict__) for module in model.modules()]
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    plain, calls = cpu.linear, []
    monkeypatch.setattr(cpu, "linear", lambda *given: calls.append(1) or plain(*given))
    first, second = Engine(model, kernels="cpu"), Engine(model, kernels="reference")
    greedy = SamplingParams(max_new_tokens=2, temperature=0)
    calls.clear()  # each engine tries its model out
    expected = model(torch.tensor([[1, 2, 3]])).logits
    assert not calls
    for event in first.stream([1, 2, 3], greedy):
        assert event.token_id >= 0 and model.config._attn_implementation == "eager"
    assert len(calls) == 2 * len(linear)
    second.generate([[1, 2, 3]], greedy)
    assert torch.equal(model(torch.tensor([[1, 2, 3]])).logits, expected)
    assert len(calls) == 2 * len(linear)
    hook = model.model.norm.register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("lost")))
    with pytest.raises(RuntimeError, match="lost"):
        first.generate([[1, 2, 3]])
    hook.remove()
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_an_engine_follows_the_weights_and_hooks_of_its_model() -> None:
    model, seen = build("llama"), []
    engine = Engine(model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0))
    model.model.layers[0].mlp.up_proj.weight.data.mul_(0.5)
    model.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
    assert difference(model, engine) < 1e-4
    assert seen


def test_a_model_whose_forward_was_set_on_it_is_served() -> None:
    """As offloading to the host does with every module, the model itself included."""
    model, calls = build("llama"), []
    expected = Engine(model).generate([[1, 2, 3]], SamplingParams(max_new_tokens=2, temperature=0))[0].token_ids

    def forward(module: Any, *given: Any, **named: Any) -> Any:
        calls.append(1)
        return module._old_forward(*given, **named)

    model._old_forward = model.forward
    model.forward = functools.partial(forward, model)
    (generation,) = Engine(model).generate([[1, 2, 3]], SamplingParams(max_new_tokens=2, temperature=0))
    assert generation.token_ids == expected and len(calls) == 1 + 2  # the engine tries the model out


def test_a_layer_with_a_forward_of_its_own_keeps_it() -> None:
    model = build("llama")
    head, calls = model.lm_head, []
    forward = head.forward
    head.forward = lambda states: calls.append(1) or forward(states)
    Engine(model).generate([[1, 2, 3]], SamplingParams(max_new_tokens=2, temperature=0))
    assert len(calls) == 1 + 2 and head.forward is not forward


@pytest.mark.parametrize("move", [torch.float64, torch.bfloat16, "meta"], ids=str)
def test_a_model_that_has_moved_is_refused_by_its_engine(move: Any, make_compressed: Any) -> None:
    model = make_compressed()
    engine = Engine(model)
    engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=2))
    model.to(move)
    with pytest.raises(RuntimeError, match=r"the model is now .* make a new Engine after model.to"):
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=2))
    assert engine.blocks_in_use == 0


def test_layers_that_never_ask_for_the_cache_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    monkeypatch.setattr(
        type(model.model.layers[0].self_attn), "forward", lambda self, hidden_states, **_: (hidden_states, None)
    )
    with pytest.raises(NotImplementedError, match="0 of the model's 2 layers use the paged cache"):
        Engine(model).generate([[1, 2, 3]], SamplingParams(max_new_tokens=1))
