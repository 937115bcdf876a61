"""Ranks that share each sequence compute the loss and the gradients of one rank that has it whole."""

import pytest
import torch
from launching import Processes
from laying import write_gradients

from dmc.config import build_config
from dmc.training.config import RunConfig

RATIO = {"stages": {"retrofit": {"length": "4 steps"}}}
DROP = {"action": "drop", "delay": 4, "target_ratio": 2.0}
RUNS = {
    "merge": ({"delay": 0}, {"head_agreement_weight": 0.5}, {}),
    "documents": ({"delay": 3}, {"document_masking": True}, {}),
    "drop": (DROP | {"gate_input": "hidden", "decided_token": "previous"}, {"activation_checkpointing": True}, {}),
    "query": (DROP | {"gate_input": "query"}, {"ratio_prior": "local"}, {"model_type": "qwen2"}),
    "layer": (
        {"gate_input": "both", "decisions": "per_layer"},
        {"distillation": {"path": "another"}},
        {"model_type": "qwen3"},
    ),
    "fixed": ({"decisions": "fixed", "weighting": "uniform"}, {}, {}),
    "zero-out": (
        {"gate_input": "both"},
        {"stages": {"zero_out": {"length": "4 steps"}, "retrofit": {"length": "4 steps"}}},
        {},
    ),
    "control": ({}, {}, {"model_type": "qwen3"}),
}
"""Changes of gates, training and model of each run."""
LAYOUTS = {
    "2 tensors": (2, {"strategy": "fsdp2", "tensor_parallel_size": 2}),
    "2 contexts": (2, {"strategy": "ddp", "context_parallel_size": 2}),
    "4 contexts": (4, {"strategy": "fsdp2", "context_parallel_size": 4}),
    "2 copies of 2 contexts": (4, {"strategy": "hsdp", "shard_size": 2, "context_parallel_size": 2}),
    "2 contexts x 2 tensors": (4, {"strategy": "fsdp2", "context_parallel_size": 2, "tensor_parallel_size": 2}),
}


def run_of(values, name, count=1, trainer=None):
    gates, training, shape = RUNS[name]
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4} | shape
    return build_config(
        RunConfig,
        values
        | {
            "base": {"shape": values["base"]["shape"] | shape},
            "compression": {"window_size": 3, "decision_offset": 0.5, "target_ratio": 4.0} | gates,
            "control": name == "control",
            "training": values["training"] | RATIO | training,
            "trainer": values["trainer"] | {"devices": count} | (trainer or {}),
        },
    )


@pytest.fixture(scope="module")
def texts():
    return torch.randint(0, 300, (2, 32), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=[] if size == 2 else pytest.mark.slow) for layout, (size, _) in LAYOUTS.items()],
)
def test_ranks_that_share_sequences_have_the_loss_and_the_gradients_of_one(run_values, texts, layout, tmp_path):
    count, trainer = LAYOUTS[layout]
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    alone.mkdir(), shared.mkdir()
    runs = {name: (run_of(run_values, name, count, trainer), 2) for name in RUNS}
    with Processes(write_gradients, (runs, texts, shared), count, log := tmp_path / "log") as ranks:
        write_gradients(0, {name: (run_of(run_values, name), 2) for name in RUNS}, texts, alone)
        assert set(ranks.join()) == {0}, log.read_text()[-4000:]
    for name in RUNS:
        expected, found = torch.load(alone / f"{name}.pt"), torch.load(shared / f"{name}.pt")
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            torch.testing.assert_close(
                found[key], value, atol=1e-5, rtol=1e-5, msg=lambda difference: f"{name} {key}: {difference}"
            )
