"""Nothing that a step makes lies on another device than the model: tensors without data refuse to be mixed."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from transformers import masking_utils

import dmc.compression.gates as gates_module
from dmc.compression import CompressionConfig
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
