"""Adapters that are fitted to what a second pass over the text attends to."""

import numpy as np
import pytest
import torch
from launching import train_ranks
from transformers import LlamaConfig, LlamaForCausalLM

from dmc.compression import CompressionConfig
from dmc.config import RunConfig, build_config
from dmc.models import load_model, retrofit
from dmc.training import train
from dmc.training.callbacks.informed_start import decision_rows, fit_scores

GATES = {"action": "drop", "gate_input": "hidden", "delay": 2}
HALF = 9


def stock() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=12, intermediate_size=16, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, head_dim=4, attn_implementation="eager", initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def naive_fit(model: LlamaForCausalLM, texts: torch.Tensor, ridge: float) -> tuple[np.ndarray, np.ndarray]:
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
def test_gates_are_fitted_to_what_the_repetition_attends_to(ridge: float) -> None:
    texts = torch.randint(0, 50, (6, HALF), generator=torch.Generator().manual_seed(1))
    expected, predicted = naive_fit(stock(), texts, ridge)
    model = retrofit(stock(), CompressionConfig(**GATES)).train()
    filled = torch.cat((texts, torch.zeros(6, HALF + 1).long()), 1)  # the second halves are not read
    parts = [fit_scores(model, [{"input_ids": ids} for ids in filled.split(3)], ridge, [layer]) for layer in (0, 1)]
    assert model.training and [list(part) for part in parts] == [[0], [1]]  # each rank has the sums of its layers alone
    fits = [part[layer] for layer, part in enumerate(parts)]
    np.testing.assert_allclose(np.stack([fit.rows for fit in fits]), expected, rtol=1e-3, atol=1e-3)
    rows = np.stack(decision_rows(fits))
    wanted = -expected / predicted.std()
    wanted[..., -1] += predicted.mean() / predicted.std()
    np.testing.assert_allclose(rows, wanted, rtol=1e-3, atol=1e-3)


def test_a_run_without_stages_exports_fitted_gates_at_the_target_and_no_other_change(run_values, tmp_path) -> None:
    base = {**run_values, "compression": None, "output_dir": str(tmp_path / "base")}
    base["training"] = {**run_values["training"], "stages": {"pretrain": {"steps": 4}}, "snapshot_ratios": []}
    path = train(build_config(RunConfig, base)).final
    run_values["model"] = {"path": str(path)}
    run_values["compression"] = GATES | {"target_ratio": 2.0, "decision_scale": 2.0}
    run_values["training"] |= {"stages": {}, "regressed_start": {"sequences": 4}, "snapshot_ratios": []}
    run = train(build_config(RunConfig, run_values))
    assert run.is_finished and abs(run.metrics(run.final)["achieved_ratio_on_calibration_text"] / 2 - 1) < 0.1
    before, after = load_model(path).state_dict(), load_model(run.final).state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert all(after[name][0::2].any() and not after[name][1::2].any() for name in set(after) - set(before))
    run_values["trainer"] |= {"devices": 2, "strategy": "fsdp2"}
    run_values["training"]["micro_batch_size"] = 1
    train_ranks(dict(run_values, output_dir=str(tmp_path / "two")), 2, tmp_path / "log")
    again = load_model(tmp_path / "two" / "final").state_dict()
    assert all(torch.allclose(again[name], weight, atol=1e-5) for name, weight in after.items())


@pytest.mark.parametrize(
    ("compression", "training", "trainer", "told"),
    [
        ({"action": "merge"}, {}, {}, "regressed_start with compression.action=merge"),
        ({"gate_input": "both"}, {}, {}, "gate_input=hidden"),
        ({}, {}, {"strategy": "deepspeed_zero3"}, r"regressed_start with trainer\.strategy=deepspeed_zero3"),
        ({}, {"measured_start": {}}, {}, r"leave out training\.measured_start"),
        ({}, {"regressed_start": {"ridge": 0.0}}, {}, r"ridge=0\.0"),
        ({}, {"regressed_start": None, "stages": {}}, {}, r"stages is empty: give at least one stage, or"),
    ],
)
def test_a_fit_that_cannot_be_is_refused(run_values, compression, training, trainer, told) -> None:
    run_values["trainer"] |= trainer
    run_values["compression"] = GATES | compression
    run_values["training"] |= {"regressed_start": {}} | training
    with pytest.raises(ValueError, match=told):
        build_config(RunConfig, run_values)
