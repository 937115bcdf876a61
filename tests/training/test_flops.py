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


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("extra", [{}, {"head_dim": 12}, {"tie_word_embeddings": True}])
def test_operations_are_six_for_each_weight_of_a_matrix_and_all_scores_of_attention(family, extra):
    config, length = AutoConfig.for_model(family, **SHAPE, **extra), 16
    head_dim = getattr(config, "head_dim", None) or 8
    attention = 2 * 32 * head_dim * (4 + 2)
    weights = 3 * (attention + 3 * 32 * 48) + 32 * 96  # of three layers and the output; embeddings are looked up
    expected = 6 * weights + 12 * 3 * 4 * head_dim * length
    assert abs(flops_per_token(config, length) - expected) <= head_dim  # the angles' product


def test_layers_of_each_kind_count_as_often_as_there_are_any():
    linear, full = "linear_attention", "full_attention"

    def of(*kinds):
        shape = {**SHAPE, "num_hidden_layers": len(kinds), "layer_types": list(kinds), "head_dim": 8}
        return flops_per_token(AutoConfig.for_model("qwen3_5_text", **shape), 16)

    assert of(full, linear, linear) == of(linear, linear, full)
    assert of(full, linear, linear) - of(full, linear) == of(linear, full, linear, full) - of(full, linear, full) > 0
    assert of(full, linear, full) - of(full, linear) == of(full, full) - of(full) > 0


def test_gates_add_no_operations_to_those_that_count():
    config = AutoConfig.for_model("llama", **SHAPE)
    compressed = retrofit(AutoModelForCausalLM.from_config(config), CompressionConfig()).config
    assert flops_per_token(compressed, 16) == flops_per_token(config, 16)


@pytest.mark.parametrize("gate_input", ["neuron", "hidden", "both"])
@pytest.mark.parametrize("teacher", [None, {"path": "teacher"}])
def test_frozen_weights_need_no_gradient_and_a_teacher_a_forward(gate_input, teacher):
    config = AutoConfig.for_model("llama", **SHAPE)
    gates = {"gate_input": gate_input, "window_size": 2}
    found = run_flops_per_token(
        run(compression=gates, training__gates_only=True, training__distillation=teacher, training__sequence_length=16),
        config,
    )
    attention, scores = 32 * 8 * (4 + 2) * 2, 4 * 3 * 4 * 8 * 16
    weights = 3 * (attention + 3 * 32 * 48) + 32 * 96
    trained = 0 if gate_input == "hidden" else 3 * 32 * 8 * (4 + 2)
    # Below the first gate nothing is trained: its layer's inputs need no gradient, nor do its values.
    unneeded = 2 * 32 * 8 * (4 + 2 + 2) + 2 * 4 * 8 * 16 if gate_input == "neuron" else 0
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
