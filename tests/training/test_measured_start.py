"""Adapters that start from what compressing each head alone costs."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from dmc.compression import CompressionConfig, GateMode, GateTrace
from dmc.config import MeasuredStartConfig, RunConfig, build_config
from dmc.models import load_model, retrofit
from dmc.training import train
from dmc.training.callbacks.informed_start import COSTS_NAME, MeasuredStart, decision_biases, measure_head_costs

DELAY, LENGTH = 3, 12


def stock() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, head_dim=4, attn_implementation="eager", initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def dropping_loss(model: LlamaForCausalLM, input_ids: torch.Tensor, layer: int | None, head: int) -> float:
    """Loss of the stock model when the queries of one KV head see the first token and the last `DELAY` only."""
    position = torch.arange(LENGTH)
    distance = position[:, None] - position[None]
    causal = torch.zeros(LENGTH, LENGTH).masked_fill(distance < 0, -1e9)
    near = causal.masked_fill((distance >= DELAY) & (position > 0), -1e9)

    def narrow(module, args, kwargs):
        of_heads = [near if (module.layer_idx, query // 2) == (layer, head) else causal for query in range(6)]
        return args, kwargs | {"attention_mask": torch.stack(of_heads)[None]}

    hooks = [each.self_attn.register_forward_pre_hook(narrow, with_kwargs=True) for each in model.model.layers]
    with torch.no_grad():
        logits = model(input_ids, use_cache=False).logits[:, :-1]
        loss = float(F.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten()))
    for hook in hooks:
        hook.remove()
    return loss


def test_the_cost_of_a_head_is_what_masking_its_past_costs() -> None:
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
    costs = measure_head_costs(compressed, [{"input_ids": ids} for ids in batches])
    assert expected.abs().min() > 1e-3
    torch.testing.assert_close(costs, expected, atol=1e-5, rtol=0)
    assert compressed.training


def test_a_compressed_head_merges_all_but_the_first_token_and_the_others_none() -> None:
    model = retrofit(stock(), CompressionConfig(delay=2, gate_input="both"))
    ids = torch.randint(0, 50, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    trace = GateTrace()
    with torch.no_grad():
        model(ids, use_cache=False, gate_mode=GateMode(compressed_heads=((1, 2),)), gate_trace=trace)
    expected = torch.zeros(2, 2, 3, LENGTH)  # [L, B, H, T]
    expected[1, :, 2, 1:] = 1
    assert torch.equal(trace.stacked_alpha(), expected)


def test_cheap_heads_start_nearer_to_compression() -> None:
    costs = torch.tensor([[1.0, 0.1], [-0.5, 0.0001]])  # the last two lie below the floor
    biases = decision_biases(costs, spread=2.0, floor=0.01)
    logs = [0.0, -1.0, -2.0, -2.0]
    mean = sum(logs) / 4
    deviation = math.sqrt(sum((log - mean) ** 2 for log in logs) / 4)
    expected = torch.tensor([[-2.0 * log / deviation for log in row] for row in (logs[:2], logs[2:])])
    torch.testing.assert_close(biases, expected)
    assert not decision_biases(torch.tensor([[-1.0, 0.0]]), 2.0, 0.01).any()
    assert not decision_biases(torch.tensor([[3.0, 3.0]]), 2.0, 0.01).any()


def test_a_run_starts_from_its_measured_heads_and_does_not_measure_again(run_values, tmp_path) -> None:
    run_values["compression"] |= {"gate_input": "hidden", "decision_scale": 4.0}
    run_values["training"] |= {"learning_rate": 1e-9, "measured_start": {"sequences": 3}, "snapshot_ratios": []}
    config = build_config(RunConfig, run_values)
    final = train(config).final
    costs = torch.tensor(json.loads((tmp_path / "run" / COSTS_NAME).read_text())["nats_per_token"])
    assert (tmp_path / "run" / "heatmaps" / "head_costs.png").is_file()
    settings = MeasuredStartConfig(sequences=3)
    expected = decision_biases(costs, settings.spread, settings.floor) / 4
    biases = torch.stack([adapter.bias for adapter in load_model(final).adapters()])
    torch.testing.assert_close(biases[:, 0::2], expected, atol=1e-6, rtol=0)
    assert biases[:, 1::2].abs().max() < 1e-6  # importance

    def unread() -> list[torch.Tensor]:
        raise AssertionError("a run that goes on read the text again")

    resumed = SimpleNamespace(ckpt_path=str(tmp_path / "step_0000002"))
    MeasuredStart(unread, settings, tmp_path).on_fit_start(resumed, None)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"compression": {"gate_input": "neuron"}}, "compression.gate_input=hidden"),
        ({"compression": {"gate_input": "hidden", "decisions": "per_layer"}}, "decisions=per_head"),
        (
            {"compression": {"gate_input": "hidden"}, "trainer": {"strategy": "fsdp2", "tensor_parallel_size": 2}},
            "tensor_parallel_size=1",
        ),
        ({"training": {"measured_start": {"sequences": 0}}}, "sequences=0"),
        ({"training": {"measured_start": {"spread": 0.0}}}, "spread=0.0"),
        ({"training": {"measured_start": {"floor": 1.0}}}, "floor=1.0"),
    ],
)
def test_a_start_that_cannot_be_measured_is_refused(run_values, changes, told) -> None:
    run_values["training"]["measured_start"] = {}
    for group, values in changes.items():
        run_values[group] |= values
    with pytest.raises(ValueError, match=told):
        build_config(RunConfig, run_values)
