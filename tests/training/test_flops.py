import pytest
from planned import run
from transformers import AutoConfig, AutoModelForCausalLM

from dmc import retrofit
from dmc.compression import CompressionConfig
from dmc.training.flops import flops_per_token, peak_flops, run_flops_per_token

SHAPE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "extra"),
    [("llama", {}), ("mistral", {"head_dim": 12}), ("qwen2", {"tie_word_embeddings": True}), ("qwen3", {})],
)
def test_operations_are_six_for_each_weight_of_a_matrix_and_all_scores_of_attention(family, extra):
    config, length = AutoConfig.for_model(family, **SHAPE, **extra), 16
    head_dim = getattr(config, "head_dim", None) or 8
    attention = 2 * 32 * head_dim * (4 + 2)
    weights = 3 * (attention + 3 * 32 * 48) + 32 * 96  # of three layers and the output; embeddings are looked up
    expected = 6 * weights + 12 * 3 * 4 * head_dim * length
    assert abs(flops_per_token(config, length) - expected) <= head_dim  # the angles' product


def of_kinds(*kinds):
    shape = {**SHAPE, "num_hidden_layers": len(kinds), "layer_types": list(kinds), "head_dim": 8}
    return flops_per_token(AutoConfig.for_model("qwen3_5_text", **shape), 16)


LINEAR, FULL = "linear_attention", "full_attention"


def test_layers_of_each_kind_count_as_often_as_there_are_any():
    assert of_kinds(FULL, LINEAR, FULL) - of_kinds(FULL, LINEAR) == of_kinds(FULL, FULL) - of_kinds(FULL) > 0


@pytest.mark.slow
def test_layers_without_attention_count_wherever_they_stand():
    behind = of_kinds(FULL, LINEAR, LINEAR)
    assert behind == of_kinds(LINEAR, LINEAR, FULL)
    more = of_kinds(LINEAR, FULL, LINEAR, FULL) - of_kinds(FULL, LINEAR, FULL)
    assert behind - of_kinds(FULL, LINEAR) == more > 0


WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "sliding_window": 5}
HEADS, WIDTH, LENGTH = 4, 12, 16
ATTENTION = 2 * 32 * WIDTH * (HEADS + 2)


@pytest.mark.parametrize(
    ("family", "length"),
    [
        ("gemma3_text", LENGTH),
        ("olmo3", 3),
        *(pytest.param(family, LENGTH, marks=pytest.mark.slow) for family in ("cohere2", "exaone4", "qwen2")),
    ],
)
def test_layers_with_a_window_have_no_more_scores_than_it(family, length):
    config = AutoConfig.for_model(family, **SHAPE | WINDOWS, head_dim=WIDTH, use_sliding_window=True)
    weights = 4 * (ATTENTION + 3 * 32 * 48) + 32 * 96
    expected = 6 * weights + 12 * HEADS * WIDTH * (2 * length + 2 * min(length, 5))
    assert abs(flops_per_token(config, length) - expected) <= 2 * WIDTH


@pytest.mark.parametrize("teacher", [pytest.param(None, marks=pytest.mark.slow), {"path": "teacher"}])
def test_windows_sinks_and_experts_are_counted_together(teacher):
    experts = {"num_local_experts": 6, "num_experts_per_tok": 3}
    config = AutoConfig.for_model("gpt_oss", **SHAPE | WINDOWS, **experts, head_dim=WIDTH)
    weights = ATTENTION + 32 * 6 + 3 * 3 * 32 * 48  # of a layer: attention, router, three experts
    scores = 4 * HEADS * WIDTH  # forward, for each key that a query sees
    forward = 2 * (4 * weights + 32 * 96) + scores * (2 * LENGTH + 2 * 5)
    assert flops_per_token(config, LENGTH) == pytest.approx(3 * forward, abs=2 * WIDTH)
    for gate_input in ("neuron", "hidden"):
        gates = {"gate_input": gate_input, "window_size": 2}
        changes = {"training__gates_only": True, "training__distillation": teacher, "training__sequence_length": LENGTH}
        # The gradient flows back to the first gate, in the second layer, and weights are trained in full layers alone.
        backward = 2 * (3 * weights + 32 * 96) + 2 * scores * (2 * LENGTH + 5)
        if gate_input == "neuron":
            backward += 2 * 2 * 32 * WIDTH * (HEADS + 2) - 2 * 32 * WIDTH * (HEADS + 2 + 2) - scores * LENGTH // 2
        else:  # in the layer of the first gate it flows to the scores alone
            backward -= 2 * 32 * WIDTH * (HEADS + 2 + 2) + 3 * scores * LENGTH // 2
        expected = forward * (1 if teacher is None else 2) + backward
        assert run_flops_per_token(run(compression=gates, **changes), config) == pytest.approx(expected, abs=2 * WIDTH)


def test_every_expert_model_is_counted_layer_by_layer():
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    config = AutoConfig.for_model("qwen3_moe", **SHAPE, **experts, head_dim=WIDTH, mlp_only_layers=[1])
    weights = 3 * ATTENTION + 2 * (32 * 6 + 2 * 3 * 32 * 8) + 3 * 32 * 48 + 32 * 96
    expected = 6 * weights + 12 * 3 * HEADS * WIDTH * LENGTH
    assert flops_per_token(config, LENGTH) == pytest.approx(expected, abs=2 * WIDTH)


@pytest.mark.parametrize(
    ("family", "gate_input"), [("apertus", "neuron"), ("ministral3", "query"), ("olmo2", "hidden"), ("phi3", "neuron")]
)
def test_gates_alone_are_counted_whatever_their_family_names_its_weights(family, gate_input):
    config = AutoConfig.for_model(family, **SHAPE, pad_token_id=0, max_position_embeddings=64)
    gates = {"gate_input": gate_input, "window_size": 2}
    found = run_flops_per_token(run(compression=gates, training__gates_only=True), config)
    assert flops_per_token(config, 64, ()) < found < flops_per_token(config, 64)


def test_gates_add_no_operations_to_those_that_count():
    config = AutoConfig.for_model("llama", **SHAPE)
    compressed = retrofit(AutoModelForCausalLM.from_config(config), CompressionConfig()).config
    assert flops_per_token(compressed, 16) == flops_per_token(config, 16)


@pytest.mark.parametrize(
    ("gate_input", "teacher"), [("neuron", None), ("query", None), ("hidden", {"path": "teacher"}), ("both", None)]
)
def test_frozen_weights_need_no_gradient_and_a_teacher_a_forward(gate_input, teacher):
    config = AutoConfig.for_model("llama", **SHAPE)
    gates = {"gate_input": gate_input, "window_size": 2}
    found = run_flops_per_token(
        run(compression=gates, training__gates_only=True, training__distillation=teacher, training__sequence_length=16),
        config,
    )
    attention, scores = 32 * 8 * (4 + 2) * 2, 4 * 3 * 4 * 8 * 16
    weights = 3 * (attention + 3 * 32 * 48) + 32 * 96
    trained = 3 * 32 * 8 * {"neuron": 4 + 2, "query": 4, "hidden": 0, "both": 4 + 2}[gate_input]
    # Below the first gate nothing is trained: its layer's inputs need no gradient, nor what makes no decision.
    unneeded = 2 * 32 * 8 * (4 + 2 + 2) + 2 * 4 * 8 * 16 * {"query": 2, "hidden": 3}.get(gate_input, 1)
    expected = (4 if teacher is None else 6) * weights + 2 * trained + (3 if teacher is None else 4) * scores
    assert abs(found - expected + unneeded) <= 8


@pytest.mark.parametrize(
    ("device", "precision", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 989.4),
        ("NVIDIA H100 80GB HBM3", "32-true", 66.9),
        ("NVIDIA H100 PCIe", "bf16-mixed", 756),
        ("NVIDIA H200", "bf16-mixed", 989.4),
        ("NVIDIA H20", "bf16-mixed", 148),
        ("NVIDIA A100-SXM4-80GB", "bf16-mixed", 312),
        ("NVIDIA RTX 6000 Ada Generation", "bf16-true", 364.2),
        ("NVIDIA L40S", "32-true", 91.6),
        ("Tesla V100-SXM2-16GB", "32-true", 15.7),
        ("Tesla V100-SXM2-16GB", "bf16-mixed", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16-mixed", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16-mixed", None),
        ("cpu", "32-true", None),
    ],
)
def test_peak_follows_the_name_and_the_precision(device, precision, teraflops):
    found = peak_flops(device, precision)
    assert found is None if teraflops is None else found == pytest.approx(teraflops * 1e12)
