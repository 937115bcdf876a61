"""Adapters that start from what compressing each head alone costs, or fitted to what a second pass attends to."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from launching import train_ranks
from transformers import LlamaConfig, LlamaForCausalLM

from dmc.compression import CompressionConfig, GateMode, GateTrace
from dmc.config import build_config
from dmc.models import load_model, retrofit
from dmc.training.callbacks.adapter_init import (
    SENSITIVITY_NAME,
    AdapterInit,
    decision_biases,
    decision_rows,
    fit_scores,
    measure_head_sensitivity,
)
from dmc.training.config import RegressionInitConfig, RunConfig, SensitivityInitConfig
from dmc.training.measure import score_text
from dmc.training.run import train
from dmc.training.text_data import TextData, build_tokenizer

DELAY, LENGTH = 3, 12
FITTED = {"action": "drop", "gate_input": "hidden", "delay": 2}
HALF = 9


def stock(hidden_size=24):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=hidden_size, intermediate_size=32, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, head_dim=4, attn_implementation="eager", initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def dropping_loss(model, input_ids, layer, head):
    """Loss of the stock model when the queries of one KV head see the first token and the last `DELAY` only."""
    position = torch.arange(LENGTH)
    distance = position[:, None] - position[None]
    causal = torch.zeros(LENGTH, LENGTH).masked_fill(distance < 0, -1e9)
    near = causal.masked_fill((distance >= DELAY) & (position > 0), -1e9)

    def narrow(module, args, kwargs):
        of_heads = [near if (module.layer_idx, query // 2) == (layer, head) else causal for query in range(6)]
        return args, kwargs | {"attention_mask": torch.stack(of_heads)[None]}

    hooks = [layer.self_attn.register_forward_pre_hook(narrow, with_kwargs=True) for layer in model.model.layers]
    with torch.no_grad():
        logits = model(input_ids, use_cache=False).logits[:, :-1]
        loss = float(F.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten()))
    for hook in hooks:
        hook.remove()
    return loss


def test_the_cost_of_a_head_is_what_masking_its_past_costs():
    model = stock()
    batches = torch.randint(0, 50, (4, LENGTH), generator=torch.Generator().manual_seed(1)).split(2)
    expected = torch.tensor(
        [
            [
                sum(dropping_loss(model, ids, layer, head) - dropping_loss(model, ids, None, 0) for ids in batches) / 2
                for head in range(3)
            ]
            for layer in range(2)
        ]
    )
    gates = CompressionConfig(action="drop", delay=DELAY, gate_input="hidden")
    compressed = retrofit(stock(), gates).train()
    costs = measure_head_sensitivity(compressed, [{"input_ids": ids} for ids in batches])
    assert expected.abs().min() > 1e-3
    torch.testing.assert_close(costs, expected, atol=1e-5, rtol=0)
    assert compressed.training


def test_a_compressed_head_merges_all_but_the_first_token_and_the_others_none():
    model = retrofit(stock(), CompressionConfig(delay=2, gate_input="both"))
    ids = torch.randint(0, 50, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    trace = GateTrace()
    with torch.no_grad():
        model(ids, use_cache=False, gate_mode=GateMode(compressed_heads=((1, 2),)), gate_trace=trace)
    expected = torch.zeros(2, 2, 3, LENGTH)  # [L, B, H, T]
    expected[1, :, 2, 1:] = 1
    assert torch.equal(trace.stacked_alpha(), expected)


def test_cheap_heads_start_nearer_to_compression():
    costs = torch.tensor([[1.0, 0.1], [-0.5, 0.0001]])  # the last two lie below the floor
    biases = decision_biases(costs, spread=2.0, floor=0.01)
    logs = [0.0, -1.0, -2.0, -2.0]
    mean = sum(logs) / 4
    deviation = math.sqrt(sum((log - mean) ** 2 for log in logs) / 4)
    expected = torch.tensor([[-2.0 * log / deviation for log in row] for row in (logs[:2], logs[2:])])
    torch.testing.assert_close(biases, expected)
    assert not decision_biases(torch.tensor([[-1.0, 0.0]]), 2.0, 0.01).any()
    assert not decision_biases(torch.tensor([[3.0, 3.0]]), 2.0, 0.01).any()


def test_a_run_starts_from_its_measured_heads_and_does_not_measure_again(run_values, tmp_path):
    run_values["compression"] |= {"gate_input": "hidden", "decision_scale": 4.0}
    run_values["training"] |= {"learning_rate": 1e-9, "sensitivity_init": {"sequences": 3}}
    config = build_config(RunConfig, run_values)
    final = train(config).final
    costs = torch.tensor(json.loads((tmp_path / "run" / SENSITIVITY_NAME).read_text())["nats_per_token"])
    assert (tmp_path / "run" / "heatmaps" / "head_sensitivity.png").is_file()
    settings = SensitivityInitConfig(sequences=3)
    expected = decision_biases(costs, settings.spread, settings.floor) / 4
    biases = torch.stack([adapter.bias for adapter in load_model(final).adapters()])
    torch.testing.assert_close(biases[:, 0::2], expected, atol=1e-6, rtol=0)
    assert biases[:, 1::2].abs().max() < 1e-6  # importance

    def unread():
        raise AssertionError("a run that goes on read the text again")

    resumed = SimpleNamespace(ckpt_path=str(tmp_path / "step_0000002"))
    AdapterInit(settings, unread, tmp_path).on_fit_start(resumed, None)


@pytest.mark.parametrize("settings", [SensitivityInitConfig(sequences=9), RegressionInitConfig(sequences=9)])
def test_an_initialization_reads_as_many_sequences_as_it_asks_for(settings, tmp_path):
    def open_batches(at_least):
        raise EOFError(f"{at_least} sequences")

    with pytest.raises(EOFError, match=r"^9 sequences$"):
        AdapterInit(settings, open_batches, tmp_path).on_fit_start(SimpleNamespace(ckpt_path=None), None)


@torch.no_grad()
def naive_fit(model, texts, ridge):
    """Rows [L, H, hidden + 1] and predictions [L, H, n], from the stock model's own attention weights."""
    found = model(torch.cat((texts, texts), 1), use_cache=False, output_attentions=True, output_hidden_states=True)
    rows, predicted = [], []
    for layer, states, attention in zip(model.model.layers, found.hidden_states, found.attentions):
        inputs = layer.input_layernorm(states)
        values = layer.self_attn.v_proj(inputs).unflatten(-1, (3, 4))
        x = np.concatenate([inputs[:, 1:HALF].flatten(0, 1), np.ones((len(texts) * (HALF - 1), 1))], 1)
        y = np.zeros((3, len(texts), HALF))
        for text in range(len(texts)):
            for head in range(3):
                for i in range(HALF):
                    for query in (2 * head, 2 * head + 1):
                        out = layer.self_attn.o_proj.weight[:, 4 * query : 4 * query + 4] @ values[text, i, head]
                        for j in range(HALF, 2 * HALF):
                            score = attention[text, query, j, i] * out.norm() / states[text, j].norm()
                            y[head, text, i] = max(y[head, text, i], float(score))
        y = np.log(y[:, :, 1:]).reshape(3, -1)
        penalty = np.diag([ridge * (x[:, :-1] ** 2).sum(0).mean()] * 12 + [0.0])
        rows.append(np.linalg.solve(x.T @ x + penalty, x.T @ y.T).T)
        predicted.append(rows[-1] @ x.T)
    return np.stack(rows), np.stack(predicted)


@pytest.mark.parametrize("ridge", [1e-6, 0.1])
def test_gates_are_fitted_to_what_the_repetition_attends_to(ridge):
    texts = torch.randint(0, 50, (6, HALF), generator=torch.Generator().manual_seed(1))
    expected, predicted = naive_fit(stock(12), texts, ridge)
    model = retrofit(stock(12), CompressionConfig(**FITTED)).train()
    filled = torch.cat((texts, torch.zeros(6, HALF + 1).long()), 1)  # the second halves are not read
    parts = [fit_scores(model, [{"input_ids": ids} for ids in filled.split(3)], ridge, [layer]) for layer in (0, 1)]
    assert model.training and [list(part) for part in parts] == [[0], [1]]  # each rank has the sums of its layers alone
    fits = [part[layer] for layer, part in enumerate(parts)]
    np.testing.assert_allclose(np.stack([fit.rows for fit in fits]), expected, rtol=1e-3, atol=1e-3)
    rows = np.stack(decision_rows(fits))
    wanted = -expected / predicted.std()
    wanted[..., -1] += predicted.mean() / predicted.std()
    np.testing.assert_allclose(rows, wanted, rtol=1e-3, atol=1e-3)


def test_a_run_without_stages_exports_fitted_gates_at_the_target_and_no_other_change(run_values, tmp_path):
    base = {**run_values, "compression": None, "output_dir": str(tmp_path / "base")}
    base["training"] = {**run_values["training"], "stages": {"pretrain": {"length": "4 steps"}}}
    path = train(build_config(RunConfig, base)).final
    run_values["model"] = str(path)
    run_values["compression"] = FITTED | {"target_ratio": 2.0, "decision_scale": 2.0}
    run_values["training"] |= {"stages": {}, "regression_init": {"sequences": 4}}
    run = train(build_config(RunConfig, run_values))
    assert run.is_finished and abs(run.metrics(run.final)["achieved_ratio_on_calibration_text"] / 2 - 1) < 0.1
    before, after = load_model(path).state_dict(), load_model(run.final).state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert all(after[name][0::2].any() and not after[name][1::2].any() for name in set(after) - set(before))
    run_values["trainer"] |= {"devices": 2, "strategy": "fsdp2"}
    run_values["training"]["micro_batch_size"] = 1
    train_ranks(dict(run_values, output_dir=str(tmp_path / "two")), 2, tmp_path / "log")
    assert (tmp_path / "two" / "final" / "dmc_gates.safetensors").is_file()
    again = load_model(tmp_path / "two" / "final").state_dict()
    assert all(torch.allclose(again[name], weight, atol=1e-5) for name, weight in after.items())


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_steps_behind_a_fit_begin_near_their_target(run_values, tmp_path, scale):
    run_values["compression"] = FITTED | {"target_ratio": 3.0, "decision_scale": 2.0}
    fit = {"sequences": 8, "logit_scale": scale}
    solidify = {"length": "1 steps", "learning_rate": 1e-12, "final_fraction": 1.0}
    run_values["training"] |= {"stages": {"solidify": solidify}, "regression_init": fit, "calibrate": False}
    run_values["training"] |= {"calibration_sequences": 8}
    run = train(build_config(RunConfig, run_values))
    model = load_model(run.final)
    assert model.compression.decision_offset == run_values["compression"].get("decision_offset", 5.0)
    config = build_config(RunConfig, run_values)
    score = score_text(model, TextData(config, build_tokenizer(config), total_steps=1).held_out("calibration"))
    assert score.achieved_ratio == pytest.approx(3.0, rel=0.1)


def test_a_ramp_behind_a_fit_begins_where_gates_can_learn(run_values):
    run_values["compression"] = FITTED | {"target_ratio": 3.0}
    stages = {"retrofit": {"length": "1 steps", "learning_rate": 1e-12}}
    fit = {"sequences": 8, "logit_scale": 4.0}
    run_values["training"] |= {"stages": stages, "regression_init": fit, "calibrate": False, "calibration_sequences": 8}
    config = build_config(RunConfig, run_values)
    model, trace = load_model(train(config).final), GateTrace()
    (batch, *_) = TextData(config, build_tokenizer(config), total_steps=1).held_out("calibration")
    with torch.no_grad():
        model(batch["input_ids"], use_cache=False, gate_mode=GateMode(), gate_trace=trace)
    logits = trace.stacked_logits()
    assert abs(float(logits[logits.isfinite()].mean()) + model.compression.decision_offset) < 2.0


MEASURED, FIT = {"sensitivity_init": {}}, {"regression_init": {}}
TENSOR_PARALLEL = {"strategy": "fsdp2", "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("compression", "training", "trainer", "message"),
    [
        ({"gate_input": "neuron"}, MEASURED, {}, "compression.gate_input=hidden"),
        ({"gate_input": "hidden", "decisions": "per_layer"}, MEASURED, {}, "decisions=per_head"),
        ({"gate_input": "hidden"}, MEASURED, TENSOR_PARALLEL, "tensor_parallel_size=1"),
        (FITTED, FIT, {"strategy": "ddp", "context_parallel_size": 2}, "and context_parallel_size=1"),
        (FITTED | {"action": "merge"}, FIT, {}, "regression_init with compression.action=merge"),
        (FITTED | {"gate_input": "both"}, FIT, {}, "gate_input=hidden"),
        (FITTED, FIT, {"strategy": "deepspeed_zero3"}, r"regression_init with trainer\.strategy=deepspeed_zero3"),
        (FITTED, FIT | MEASURED, {}, r"leave out training\.sensitivity_init"),
        (FITTED, {"stages": {}}, {}, r"stages is empty: give a stage a length, or"),
    ],
)
def test_a_start_that_cannot_be_is_refused(run_values, compression, training, trainer, message):
    run_values["trainer"] |= trainer
    run_values["compression"] = compression
    run_values["training"] |= training
    with pytest.raises(ValueError, match=message):
        build_config(RunConfig, run_values)
