"""Losses of 20 steps as they were before the step was made faster: what computes them may change, they may not."""

import json
from pathlib import Path

import pytest
import torch
from launching import logged

from dmc.config import build_config
from dmc.training.config import RunConfig
from dmc.training.run import fresh_model, train
from dmc.training.text_data import build_tokenizer

RECORDED = Path(__file__).parent / "step_losses.json"
"""Losses of each run at each step, in float32 on a CPU."""
RUNS = {
    "neuron": {
        "compression": {"delay": 0},
        "training": {"stages": {"zero_out": {"length": "4 steps"}, "retrofit": {"length": "16 steps"}}},
    },
    "adapters and weights": {
        "compression": {"gate_input": "hidden", "delay": 2},
        "training": {"distillation": {"weight": 0.75, "temperature": 1.5}},
    },
    "gates alone": {
        "compression": {"gate_input": "hidden", "action": "drop", "delay": 3},
        "training": {"distillation": {"direction": "reverse"}, "gates_only": True, "activation_checkpointing": True},
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_twenty_steps_have_the_losses_that_they_had(run_values, tmp_path, name, only_trained):
    run_values["training"] |= {"stages": {"retrofit": {"length": "20 steps"}}, "checkpoint_every_steps": 100}
    run_values["training"]["validate_every_steps"] = 100
    config = build_config(RunConfig, run_values)
    tokenizer = build_tokenizer(config)
    base = fresh_model(config, len(tokenizer), seed=3)
    torch.nn.init.normal_(base.lm_head.weight, std=0.3)
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    for group, values in RUNS[name].items():
        run_values[group] |= values
    run_values["model"] = str(tmp_path / "base")
    run_values["data"]["tokenizer"] = {}
    folder = train(build_config(RunConfig, run_values)).folder
    expected = json.loads(RECORDED.read_text())[name]
    for figure, losses in expected.items():
        assert [logged(folder, figure)[step] for step in range(20)] == pytest.approx(losses, rel=1e-5, abs=1e-6), figure
