import pytest
from transformers import AutoConfig

from dmc.training.layer_kinds import layer_kinds, with_layers

SHAPE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 512,
}  # fmt: skip
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 5}
ERNIE = {"moe_k": 2, "moe_num_experts": 4, "moe_layer_start_index": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
MODELS = {
    "llama": ({}, "AAAAAAAA"),
    "mistral": ({"sliding_window": 5}, "AAAAAAAA"),
    "olmo3": (WINDOWS, "ABABABAB"),
    "gpt_oss": ({**WINDOWS, **EXPERTS, "num_local_experts": 4}, "ABABABAB"),
    "qwen3_moe": ({**EXPERTS, "num_experts": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]}, "AAABABAB"),
    "glm4_moe": ({**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 3}, "AAABBBBB"),
    "ernie4_5_moe": (ERNIE, "AABBBBBB"),
    "ernie4_5_moe, every second": ({**ERNIE, "moe_layer_end_index": 6, "moe_layer_interval": 2}, "AAABABAA"),
    "hy_v3": ({**EXPERTS, "num_experts": 4, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6}, "AABBBBBB"),
}


@pytest.mark.parametrize("family", MODELS)
def test_a_model_of_some_layers_has_these_layers_kinds(family):
    options, expected = MODELS[family]
    config = AutoConfig.for_model(family.partition(",")[0], **SHAPE | options)
    kinds = layer_kinds(config)
    names = {kind: "AB"[number] for number, kind in enumerate(dict.fromkeys(kinds))}
    assert "".join(names[kind] for kind in kinds) == expected
    for kept in ([0, 7], [1, 2, 3, 6], [0, 1, 4, 5, 6, 7]):
        assert layer_kinds(with_layers(config, kept)) == [kinds[number] for number in kept]


def test_layers_with_experts_that_no_interval_describes_are_refused_in_one_line():
    options, _ = MODELS["ernie4_5_moe, every second"]
    config = AutoConfig.for_model("ernie4_5_moe", **SHAPE | options)
    with pytest.raises(NotImplementedError, match=r"of 3 layers \[0, 2\] have experts: no moe_layer_interval says so"):
        with_layers(config, [3, 4, 5])
