"""Floating-point operations of a training step, and the peaks of GPUs."""

from __future__ import annotations

import re

import torch
from lightning.fabric.utilities.throughput import measure_flops
from torch import nn
from torch._subclasses import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from dmc.compression.full_attention import RECURRENT_SIZES
from dmc.training.config import RunConfig

PEAK_TERAFLOPS: tuple[tuple[str, float | None, float], ...] = (
    ("GB200", 2500, 80), ("B200", 2250, 75), ("GH200", 989.4, 66.9), ("H200 NVL", 835.5, 60), ("H200", 989.4, 66.9),
    ("H100 PCIe", 756, 51.2), ("H100 NVL", 835.5, 60), ("H100", 989.4, 66.9), ("H800 PCIe", 756, 51.2),
    ("H800", 989.4, 66.9), ("H20", 148, 44), ("A100", 312, 19.5), ("A800", 312, 19.5), ("A40", 149.7, 37.4),
    ("A30", 165, 10.3), ("A10", 125, 31.2), ("A6000", 154.8, 38.7), ("6000 Ada", 364.2, 91.1), ("L40S", 362, 91.6),
    ("L40", 181, 90.5), ("L4", 121, 30.3), ("RTX 5090", 209.5, 104.8), ("RTX 4090", 165.2, 82.6),
    ("RTX 3090", 71, 35.6), ("V100", None, 15.7), ("T4", None, 8.1),
)  # fmt: skip
"""Part of a GPU's name, the more specific first; peaks by data sheet: dense bfloat16, and float32 without TF32."""


def run_flops_per_token(config: RunConfig, model: PretrainedConfig) -> float:
    """Count the floating-point operations of one token of a run: see `flops_per_token`, and a teacher's forward.

    Weights that `training.gates_only` freezes need no gradient: two thirds of the operations are left.

    Args:
        config: the run.
        model: configuration of its model.
    """
    gates, length = config.gates, config.training.sequence_length
    parts: tuple[str, ...] = ("",)
    if gates is not None and config.training.gates_only:
        neuron = ("q_proj", "k_proj") if gates.borrows_neuron else ()
        # A norm has no product, and the gradient flows to it as to an adapter.
        parts = (*neuron, *(("input_layernorm",) if gates.has_adapter else ()))
    needed = flops_per_token(model, length, parts)
    return needed if config.distillation is None else needed + flops_per_token(model, length, ())


def flops_per_token(config: PretrainedConfig, sequence_length: int, trained: tuple[str, ...] = ("",)) -> float:
    """Count the floating-point operations of the stock model's forward and backward for one token.

    Causal attention counts in full, and neither recomputed activations nor the compression count, as is usual for MFU
    (PaLM, arXiv:2204.02311, appendix B). Of experts those count that a token is sent to.

    Args:
        config: configuration of a model of a family in the table, stock or compressed.
        sequence_length: tokens per sequence.
        trained: parts of the names of the weights that get a gradient; the gradient flows back to the first of them
            alone. Empty: there is no backward.
    """
    has_experts = getattr(config, "num_experts_per_tok", None) is not None  # maybe in some layers alone
    kinds_of_layers = getattr(config, "layer_types", None) or []
    is_recurrent = all(hasattr(config, size) for size in RECURRENT_SIZES)  # layers may have no attention
    dropped = ("compression",) if is_recurrent else ("compression", "layer_types")
    values = {key: value for key, value in config.to_dict().items() if key not in dropped}
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}  # no rotation counts; some look at data
    family = values.pop("model_type").removeprefix("dmc_")
    differ = has_experts or is_recurrent
    depth = config.num_hidden_layers if differ else min(2, config.num_hidden_layers)
    stock = AutoConfig.for_model(family, **values | {"num_hidden_layers": depth})
    with FakeTensorMode():  # of fused attention torch counts only some kernels, of grouped products none
        model = AutoModelForCausalLM.from_config(
            stock, attn_implementation="eager", **({"experts_implementation": "batched_mm"} if has_experts else {})
        )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in trained))
        tokens = torch.zeros(1, sequence_length, dtype=torch.long)
        layers = list(model.model.layers)

        def counted(*of_layers: nn.Module) -> int:
            model.model.layers = nn.ModuleList(of_layers)
            if is_recurrent:
                model.config.layer_types = [kinds_of_layers[layers.index(layer)] for layer in of_layers]
            return measure_flops(model, lambda: model(tokens, use_cache=False).logits, torch.sum if trained else None)

        kinds: dict[str, list[nn.Module]] = {}
        for layer in layers[1:]:
            kinds.setdefault(repr([(name, *weight.shape) for name, weight in layer.named_parameters()]), []).append(
                layer
            )
        first = counted(layers[0])
        others = sum((counted(layers[0], kind[0]) - first) * len(kind) for kind in kinds.values())
        if not differ and depth > 1:
            others *= config.num_hidden_layers - 1
    return (first + others) / sequence_length


def peak_flops(device_name: str, precision: str) -> float | None:
    """Look up the peak floating-point operations per second of a GPU's data sheet.

    Args:
        device_name: name from `torch.cuda.get_device_name`.
        precision: bfloat16 arithmetic if it starts with bf16, else float32.
    Returns:
        None: the device is not in the table, or is only a slice of one.
    """
    words = re.findall(r"\w+", device_name.lower())
    if "mig" in words or "laptop" in words:
        return None
    for name, bfloat16, float32 in PEAK_TERAFLOPS:
        if set(name.lower().split()) <= set(words):
            teraflops = bfloat16 if precision.startswith("bf16") else float32
            return None if teraflops is None else teraflops * 1e12
    return None
