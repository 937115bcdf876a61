import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from dmc.training.flops import flops_per_token, peak_flops

SHAPE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("extra", [{}, {"head_dim": 12}, {"tie_word_embeddings": True}])
def test_operations_are_those_that_torch_counts(family, extra):
    config = AutoConfig.for_model(family, **SHAPE, **extra)
    if family == "mistral":
        config.sliding_window = None
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    length = 16
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, length, dtype=torch.long)).logits.sum().backward()
    rotary = 2 * (getattr(config, "head_dim", None) or 8) // 2 * length * 2  # torch computes the angles by a product
    assert abs(counter.get_total_flops() - 2 * length * flops_per_token(config, length)) <= rotary


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
