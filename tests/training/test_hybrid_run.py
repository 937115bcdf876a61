"""A model with windows and sinks, or with layers without attention, is trained, exported, compared and served."""

from __future__ import annotations

import pytest
import torch
from composing import CONFIGS
from launching import logged_losses, train_ranks
from report_rows import NEEDLE
from starlette.testclient import TestClient
from transformers import AutoTokenizer

from dmc import Engine
from dmc.config import build_config
from dmc.models import load_model
from dmc.results.compare import compare
from dmc.results.grid import CompareConfig
from dmc.results.store import Store
from dmc.serving.answers import LocalService
from dmc.serving.config import Limits
from dmc.serving.server import make_app
from dmc.serving.worker import Worker
from dmc.training.config import RunConfig
from dmc.training.run import fresh_model, train

WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 12}
STATES = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
SHAPES = {
    "gemma3_text": {**WINDOWS, "query_pre_attn_scalar": 8},
    "gpt_oss": {**WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": {**STATES, **EXPERTS},
    "qwen3_5_text": STATES,
}


def load(path, dtype, revision):
    return load_model(path), AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=() if family == "qwen3_5_text" else pytest.mark.slow) for family in SHAPES],
)
def test_a_hybrid_is_trained_exported_compared_and_served(family, run_values, tmp_path):
    shape = {"model_type": family, "num_hidden_layers": 4, "max_position_embeddings": 512, **SHAPES[family]}
    run_values["base"]["shape"] |= shape
    run = train(build_config(RunConfig, run_values))
    model, metrics = load_model(run.final), run.metrics(run.final)
    assert len(model.compressed_layers) == 2 and metrics["achieved_ratio"] >= 1
    grid = {"models": {"cr4": str(run.final)}, "policies": ["full", "snapkv"], "budgets": [2], "tasks": [NEEDLE]}
    table = compare(build_config(CompareConfig, {**grid, "output": str(tmp_path / "grid")}), CONFIGS, load)
    rows = Store(tmp_path / "grid" / "cells.jsonl").rows()
    assert "cr4" in table and [len(row["head_ratios"]) for row in rows] == [2, 2]  # layers that are compressed
    worker = Worker({"cr4": Engine(*load(run.final, None, None), memory=2**22, prefix_cache=True)}, 8)
    worker.start()
    try:
        with TestClient(make_app(LocalService(worker), (), Limits())) as client:
            asked = {"model": "cr4", "prompt": "import os\n" * 20, "max_tokens": 5, "temperature": 0}
            first, again = (client.post("/v1/completions", json=asked).json() for _ in range(2))
    finally:
        worker.stop()
    assert first["choices"][0]["text"] == again["choices"][0]["text"] and first["usage"]["completion_tokens"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed_zero3"])
def test_ranks_learn_what_one_does_of_layers_without_attention(strategy, run_values, tmp_path):
    """With FSDP2 of documents that do not see each other, several in a sequence, of which DeepSpeed is refused."""
    run_values["base"]["shape"] |= {"model_type": "qwen3_next", "num_hidden_layers": 2, **STATES, **EXPERTS}
    run_values["base"]["shape"]["layer_types"] = STATES["layer_types"][:2]
    run_values["training"] |= {
        "stages": {"zero_out": {"length": "1 steps"}, "retrofit": {"length": "3 steps"}},
        "document_masking": strategy == "fsdp2",
        "batch_size": 4, "micro_batch_size": 1, "validate_every_steps": 4, "checkpoint_every_steps": 4,
    }  # fmt: skip
    run_values["compression"] |= {"gate_input": "hidden"}
    fresh_model(build_config(RunConfig, run_values), 300, seed=3).save_pretrained(tmp_path / "base")
    values = run_values | {"model": str(tmp_path / "base")}
    alone = train(build_config(RunConfig, values | {"output_dir": str(tmp_path / "alone")})).folder
    folder, trainer = tmp_path / strategy, values["trainer"] | {"devices": 2, "strategy": strategy}
    train_ranks(values | {"output_dir": str(folder), "trainer": trainer}, 2, tmp_path / "log")
    assert logged_losses(folder) == pytest.approx(logged_losses(alone), abs=1e-5)
    model, same = (load_model(run / "final").state_dict() for run in (alone, folder))
    assert model.keys() == same.keys()
    for name, weight in model.items():
        torch.testing.assert_close(same[name], weight, rtol=0, atol=2e-6)
