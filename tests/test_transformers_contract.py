"""The seams of transformers that `dmc` stands on; the pin in pyproject.toml is the range on which these pass."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, Cache, GenerationMixin, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface, create_causal_mask

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def attention_class(family: str) -> type[nn.Module]:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return getattr(module, f"{family.capitalize()}Attention")


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_takes_these_keywords_and_passes_the_rest(family: str) -> None:
    parameters = inspect.signature(attention_class(family).forward).parameters
    assert list(parameters)[:4] == ["self", "hidden_states", "position_embeddings", "attention_mask"]
    assert "past_key_values" in parameters
    assert parameters["kwargs"].kind is inspect.Parameter.VAR_KEYWORD


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_layers_have_the_names_the_mixin_reads(family: str, make_stock: Any) -> None:
    attention = make_stock(family).model.layers[1].self_attn
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "layer_idx", "scaling"):
        assert hasattr(attention, name)
    assert attention.layer_idx == 1
    assert hasattr(attention, "q_norm") == hasattr(attention, "k_norm") == (family == "qwen3")
    assert (attention.q_proj.bias is not None) == (family == "qwen2")
    assert list(inspect.signature(attention_class(family).__init__).parameters)[1:3] == ["config", "layer_idx"]


@pytest.fixture
def recorded() -> Any:
    """Register an attention that records what reaches it; taken off again afterwards."""
    calls: list[dict[str, Any]] = []

    def attend(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        calls.append({"query": query, "key": key, "attention_mask": attention_mask, **kwargs})
        return query.transpose(1, 2).contiguous(), None

    AttentionInterface.register("recording", attend)
    AttentionMaskInterface.register("recording", lambda *, attention_mask=None, **_: attention_mask)
    yield calls
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop("recording")


@pytest.mark.parametrize("family", FAMILIES)
def test_registered_attention_gets_the_flat_mask_and_every_keyword(
    family: str, make_stock: Any, recorded: list[dict[str, Any]]
) -> None:
    model = make_stock(family)
    model.set_attn_implementation("recording")
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    token = object()
    model(torch.ones(2, 4, dtype=torch.long), attention_mask=mask, paged_cache=token, use_cache=False)
    assert len(recorded) == 2
    for call in recorded:
        assert call["paged_cache"] is token
        assert call["attention_mask"].dtype == torch.bool
        assert torch.equal(call["attention_mask"], mask.bool())
        assert call["scaling"] == 16**-0.5
        assert call["query"].shape == (2, 4, 4, 16)
        assert call["key"].shape == (2, 2, 4, 16)


def test_attention_without_a_mask_function_loses_padding() -> None:
    config = LlamaConfig(num_hidden_layers=1)
    config._attn_implementation = "not_registered_anywhere"
    mask = create_causal_mask(
        config=config,
        inputs_embeds=torch.zeros(1, 3, 8),
        attention_mask=torch.tensor([[0, 1, 1]]),
        past_key_values=None,
        position_ids=torch.arange(3)[None],
    )
    assert mask is None  # why the engine's attention, which has none, is only there while a pass runs


def test_generate_prepares_its_cache_in_a_method_of_this_shape() -> None:
    parameters = inspect.signature(GenerationMixin._prepare_cache_for_generation).parameters
    assert list(parameters)[:3] == ["self", "generation_config", "model_kwargs"]


def test_a_prepared_cache_is_the_one_the_layers_see(make_stock: Any) -> None:
    seen = []

    class Counting(Cache):
        def __init__(self) -> None:
            super().__init__(layers=[])
            self.count = 0

        def update(self, key: Any, value: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            seen.append(layer_idx)
            if layer_idx == 1:
                self.count += key.shape[2]
            return key, value

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return self.count

        def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
            return query_length, 0

        def get_query_offset(self, layer_idx: int = 0) -> int:
            return 0

        is_compileable = False

    class Model(LlamaForCausalLM):
        def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict, *args: Any) -> None:
            model_kwargs["past_key_values"] = Counting()

    model = Model(make_stock().config).eval()
    model.generate(torch.ones(1, 5, dtype=torch.long), max_new_tokens=3, do_sample=False)
    assert seen == [0, 1] * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_to_keep_takes_an_index(family: str, make_stock: Any) -> None:
    model = make_stock(family)
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
        kept = model(tokens, use_cache=False, logits_to_keep=torch.tensor([1, 4, 8])).logits
    torch.testing.assert_close(kept, whole[:, [1, 4, 8]])


def test_position_ids_of_several_sequences_may_lie_in_one_row(make_stock: Any) -> None:
    model = make_stock()
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    hidden = torch.zeros(1, 5, 48)
    cos, _ = model.model.rotary_emb(hidden, positions)
    torch.testing.assert_close(cos[0, 3:], cos[0, :2])
    assert cos.shape == (1, 5, 16)


def test_configs_are_dataclasses_that_keep_a_nested_dict(tmp_path: Any) -> None:
    class Nested:
        def __post_init__(self, compression: dict[str, Any] | None = None, **kwargs: Any) -> None:
            self.compression = compression or {}
            super().__post_init__(**kwargs)  # type: ignore[misc]

    class NestedConfig(Nested, LlamaConfig):
        model_type = "nested_llama"

    assert dataclasses.is_dataclass(LlamaConfig)
    config = NestedConfig(num_hidden_layers=1, compression={"delay": 3, "window_size": None})
    config.save_pretrained(tmp_path)
    loaded = NestedConfig.from_pretrained(tmp_path)
    assert loaded.compression == {"delay": 3, "window_size": None}
    assert loaded.num_hidden_layers == 1


def test_rope_parameters_name_their_type() -> None:
    assert LlamaConfig().rope_parameters["rope_type"] == "default"
    assert (
        LlamaConfig(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}).rope_parameters["factor"]
        == 2.0
    )


def test_sliding_window_is_a_field_that_may_be_none(make_stock: Any) -> None:
    assert make_stock("mistral").config.sliding_window is None
    layer_types = make_stock("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1).config.layer_types
    assert layer_types == ["full_attention", "sliding_attention"]


def test_weights_assign_onto_a_model_built_without_memory(make_stock: Any) -> None:
    stock = make_stock()
    with torch.device("meta"):
        empty = LlamaForCausalLM(stock.config)
    empty.load_state_dict(stock.state_dict(), assign=True)
    assert all(
        ours.data_ptr() == theirs.data_ptr()
        for ours, theirs in zip(empty.parameters(), stock.parameters(), strict=True)
    )


def test_stateful_models_are_never_decoded_speculatively() -> None:
    assert LlamaForCausalLM._is_stateful is False
    assert "_is_stateful" in inspect.getsource(GenerationMixin)
