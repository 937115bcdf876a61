"""Gates that see the hidden state: what they add to a model, and what they leave as it was."""

import pytest
import torch

from dmc import load_model, retrofit
from dmc.compression import CompressionConfig, Compressor, GateMode
from dmc.models.adapter import GateAdapter


def test_an_adapter_maps_each_token_to_two_logits_of_each_head():
    adapter = GateAdapter(6, 3).requires_grad_(False)
    assert not adapter.weight.any()
    adapter.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    states = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))
    out = adapter.logits(states)
    for row in range(2):
        for token in range(5):
            for head in range(3):
                for what in range(2):
                    expected = float(adapter.weight[2 * head + what] @ states[row, token])
                    assert float(out[row, what, head, token]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("gate_input", ["hidden", "both"])
def test_gates_add_what_the_adapter_says(gate_input):
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, 7, 8, generator=generator) for heads in (4, 2))
    adapted = torch.randn(2, 2, 2, 7, generator=generator)
    config = CompressionConfig(gate_input=gate_input, decision_offset=0.3, omega_offset=0.5, decision_scale=2.0)
    gated = Compressor(config, 8).gate(query, key, GateMode(), 0, adapted=adapted)
    key_logits, importance = key[..., -1], query[..., -1].view(2, 2, 2, 7).mean(2)
    if gate_input == "hidden":
        key_logits, importance = torch.zeros_like(key_logits), torch.zeros_like(importance)
        assert torch.equal(gated.key, key)
        assert torch.equal(gated.query, query)
    torch.testing.assert_close(gated.logits, 2 * (key_logits + adapted[:, 0]) - 0.3)
    torch.testing.assert_close(gated.omega, torch.sigmoid(importance + adapted[:, 1] + 0.5) + 2**-7)


def test_an_exported_adapter_comes_back(make_compressed, make_prompts, tmp_path):
    model = make_compressed(gates={"gate_input": "both"})
    model.save_pretrained(tmp_path)
    assert "tp_plan" not in (tmp_path / "config.json").read_text()
    same, ids = load_model(tmp_path), torch.tensor(make_prompts(30))
    assert len(same.adapters()) == 2
    with torch.no_grad():
        torch.testing.assert_close(same(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def test_a_compressed_model_gains_or_loses_no_adapter(make_compressed):
    with pytest.raises(ValueError, match="gate_input='hidden' cannot replace 'neuron'"):
        retrofit(make_compressed(), CompressionConfig(gate_input="hidden"))
