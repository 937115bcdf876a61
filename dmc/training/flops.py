"""Floating-point operations of a training step, and the peaks of GPUs.

Operations are counted by Lightning's `measure_flops`, of a model whose gates and shortened attention it can see. Peaks
are our own: Lightning's `get_available_flops` knows only a GPU that is there, and 6 of the 13 rows of
`test_peak_follows_the_name_and_the_precision` are different in it. An H200 has none, an L40S that of an L4, a slice of
an H100 that of the whole; an H100 NVL has the peak of sparse products.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from lightning.fabric.utilities.throughput import measure_flops
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from dmc.compression.full_attention import layer_windows
from dmc.training.config import RunConfig
from dmc.training.layer_kinds import has_experts, layer_kinds, with_layers

COUNTED_ATTENTION, ADAPTER = "dmc_counted", "gate_adapter"

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

    Weights that `training.gates_only` freezes need no gradient: two thirds of the operations are left, and of layers
    below the first gate one third.

    Args:
        config: the run.
        model: configuration of its model.
    """
    gates, length = config.gates, config.training.sequence_length
    parts: tuple[str, ...] = ("",)
    layers: list[int] | None = None
    if gates is not None and config.training.gates_only:
        parts = (
            *(("q_proj", "qkv_proj") if gates.borrows_neuron else ()),
            *(("k_proj",) if gates.borrows_key_neuron else ()),
        )
        parts += (ADAPTER,) if gates.has_adapter else ()
        layers = [index for index, window in enumerate(layer_windows(model)) if window is None]
    needed = flops_per_token(model, length, parts, layers)
    return needed if config.distillation is None else needed + flops_per_token(model, length, ())


def flops_per_token(
    config: PretrainedConfig,
    sequence_length: int,
    trained: tuple[str, ...] = ("",),
    trained_layers: Sequence[int] | None = None,
) -> float:
    """Count the floating-point operations of the stock model's forward and backward for one token.

    Causal attention counts in full, in a layer with a window as many keys as it has. Neither recomputed activations nor
    the compression count, as is usual for MFU (PaLM, arXiv:2204.02311, appendix B). Of experts those count that a token
    is sent to.

    Args:
        config: configuration of a model of a family in the table, stock or compressed.
        sequence_length: tokens per sequence.
        trained: parts of the names of the weights that get a gradient, `ADAPTER` for those of gates; the gradient flows
            back to the first layer that has one alone. Empty: there is no backward.
        trained_layers: numbers of the layers in which they are trained; None: all.
    """
    values = {key: value for key, value in config.to_dict().items() if key != "compression"}
    rope = values.get("rope_parameters") or {}
    needed = rope if "llama_4_scaling_beta" in rope else {"rope_theta": 1e4}
    values["rope_parameters"] = needed | {"rope_type": "default"}  # no rotation counts; some look at data
    stock = AutoConfig.for_model(values.pop("model_type").removeprefix("dmc_"), **values)
    learns = [trained_layers is None or index in trained_layers for index in range(stock.num_hidden_layers)]
    first = learns.index(True)
    others: dict[tuple[str, bool, bool], list[int]] = {}  # by kind, whether they lie below, and learn
    for index, kind in enumerate(layer_kinds(stock)):
        if index != first:
            others.setdefault((kind, index < first, learns[index]), []).append(index)
    kept = sorted([first, *(alike[0] for alike in others.values())])
    with FakeTensorMode():
        model = _counted_model(stock, kept)
        layers = dict(zip(kept, model.model.layers, strict=True))
        for name, parameter in model.named_parameters():
            layer = re.search(r"\.layers\.(\d+)\.", name)
            is_meant = trained_layers is None if layer is None else learns[kept[int(layer[1])]]
            parameter.requires_grad_(is_meant and any(part in name for part in trained))
        for number, layer in layers.items():
            if ADAPTER in trained and learns[number]:
                layer.self_attn.gate = torch.zeros(1, requires_grad=True)
        tokens = torch.zeros(1, sequence_length, dtype=torch.long)

        @cache
        def counted(*numbers: int, goes_back: bool) -> int:
            model.model.layers = nn.ModuleList(layers[number] for number in numbers)
            if kinds := getattr(stock, "layer_types", None):
                model.config.layer_types = [kinds[number] for number in numbers]
            return measure_flops(model, lambda: model(tokens, use_cache=False).logits, torch.sum if goes_back else None)

        total = counted(first, goes_back=bool(trained))
        for (_, is_below, _), alike in others.items():
            goes_back = bool(trained) and not is_below
            more = counted(first, alike[0], goes_back=goes_back) - counted(first, goes_back=goes_back)
            total += more * len(alike)
    return total / sequence_length


def _counted_model(stock: PretrainedConfig, kept: Sequence[int]) -> Any:
    """Make a model of some layers whose products are those that count: torch counts no fused or grouped ones."""
    experts = {"experts_implementation": "batched_mm"} if has_experts(stock) else {}
    model = AutoModelForCausalLM.from_config(with_layers(stock, kept), attn_implementation=COUNTED_ATTENTION, **experts)
    windows = layer_windows(stock)
    for number, layer in zip(kept, model.model.layers, strict=True):
        if hasattr(layer, "self_attn"):
            layer.self_attn.window, layer.self_attn.gate = windows[number], None
    return model


def attend_counted(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Multiply as many keys, and as many values, as count for a query, [B, heads, T, D]; nothing else is right."""
    group = query.shape[1] // key.shape[1]
    key, value = (states[:, :, : module.window].repeat_interleave(group, 1) for states in (key, value))
    scores = query @ key.mT
    return ((scores if module.gate is None else scores + module.gate) @ value).transpose(1, 2), None


AttentionInterface.register(COUNTED_ATTENTION, attend_counted)


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
