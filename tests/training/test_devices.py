"""Nothing that a step makes lies on another device than the model: tensors without data refuse to be mixed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import claimed_gpu
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

import dmc.compression.gates as gates_module
from dmc.compression import CompressionConfig, GateMode
from dmc.config import RunConfig, build_config
from dmc.models import retrofit
from dmc.training.module import RetrofitModule, train_gates_only
from dmc.training.stages import Plan
from dmc.training.strategies import WholeModel


@pytest.mark.parametrize("gate_input", ["neuron", "both"])
def test_gates_alone_are_trained_on_the_device_that_gradients_are_on(make_stock, gate_input):
    model = retrofit(make_stock("qwen2"), CompressionConfig(gate_input=gate_input))
    train_gates_only(model)  # on the CPU: only then is the model moved
    for parameter, rows in model.neuron_rows():
        (hook,) = parameter._backward_hooks.values()
        assert hook(torch.ones_like(parameter, device="meta")).device.type == "meta"
        kept = hook(torch.ones_like(parameter))
        assert kept[rows].eq(1).all() and kept.sum() == kept[rows].numel()


@pytest.mark.parametrize(
    "compression",
    [
        {}, {"delay": 3}, {"action": "drop", "delay": 3, "gate_input": "both"}, {"window_size": None},
        {"decisions": "per_layer"}, {"decisions": "fixed", "weighting": "uniform"},
    ],
    ids=str,
)  # fmt: skip
def test_a_step_of_each_stage_stays_on_the_models_device(run_values, make_stock, monkeypatch, compression):
    monkeypatch.setattr(gates_module, "sample_generators", lambda seeds, *_: [None] * len(seeds))  # none there
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda _: None)  # reads values
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # knows no such device
    run_values["compression"] = compression
    run_values["training"] |= {"snapshot_ratios": [], "head_agreement_weight": 0 if "decisions" in compression else 1}
    config = build_config(RunConfig, run_values)
    plan = Plan(config.training, config.target_ratio, config.compression)
    with torch.device("meta"):
        model = retrofit(make_stock().to("meta"), config.compression).train()
        batch = {"input_ids": torch.zeros(2, 32, dtype=torch.long)}
    module = RetrofitModule(model, config, plan, 0, WholeModel(config))
    for step in {0, plan.total_steps - 1}:
        loss = module.loss_at(step, batch | {"position": torch.arange(2)})
        loss.backward()
        assert loss.device.type == "meta"
        assert {value.device.type for noted in module.noted for value in noted.values()} == {"meta"}


class AttentionKernels(TorchDispatchMode):
    """Notes the name and the dtypes of each attention kernel that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "scaled_dot_product" in name:
            self.called |= {(name, each.dtype) for each in args[:3]}
        return func(*args, **(kwargs or {}))


def on_a_gpu_without_data(model: Any) -> Any:
    """Put shapes of a model's parameters and buffers on a GPU, in place; under `FakeTensorMode`."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda")
                module._parameters[name] = torch.nn.Parameter(empty)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda")
    return model


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("gates", [{}, {"action": "drop", "delay": 3}], ids=str)
def test_a_retrofit_on_a_gpu_attends_by_the_flash_kernel_in_bfloat16(make_compressed, monkeypatch, family, gates):
    claimed_gpu.guard_devices()
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(gates_module, "sample_generators", lambda seeds, *_: [None] * len(seeds))
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda _: None)
    model = make_compressed(family, gates=gates).train()
    with FakeTensorMode(allow_non_fake_inputs=True), AttentionKernels() as kernels:
        model = on_a_gpu_without_data(model)
        input_ids = torch.zeros(1, 48, dtype=torch.long, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(input_ids, use_cache=False, gate_mode=GateMode(noise_seeds=[0])).logits
    assert (logits.device.type, logits.dtype) == ("cuda", torch.bfloat16)
    assert kernels.called == {("_scaled_dot_product_flash_attention", torch.bfloat16)}
