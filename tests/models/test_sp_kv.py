"""SP-KV (arXiv:2605.14037) as settings of the gates, beside dense attention under a bias of log u."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from composing import composed
from transformers import LlamaConfig, LlamaForCausalLM

from dmc.compression import CompressionConfig, GateMode
from dmc.models import retrofit

LENGTH, WINDOW, OFFSET, SCALE = 14, 4, 0.4, 3.0
GATES = composed("compression=sp_kv", "training=sp_kv", "model=somewhere").compression


def stock():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, head_dim=4, attn_implementation="eager", initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def gated():
    settings = dataclasses.asdict(GATES) | {"delay": WINDOW, "decision_offset": OFFSET, "decision_scale": SCALE}
    model = retrofit(stock(), CompressionConfig(**settings))
    for adapter in model.adapters():
        adapter.weight.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(3))
    return model


def dense_logits(model, adapters, ids, bias_of):
    """Run the stock model with a bias for each head and pair of query and key; `bias_of` takes utilities."""

    def attend(module, args, kwargs):
        states, adapter = kwargs["hidden_states"], adapters[module.layer_idx]
        bias = torch.zeros(len(states), 6, LENGTH, LENGTH)
        for head in range(3):
            logits = SCALE * (states @ adapter.weight[2 * head] + adapter.bias[2 * head])
            biases = bias_of(torch.sigmoid(OFFSET - logits))
            for query in range(LENGTH):
                for key in range(LENGTH):
                    if key > query:
                        bias[:, 2 * head : 2 * head + 2, query, key] = -1e9
                    elif 0 < key <= query - WINDOW:  # the first token always stays
                        bias[:, 2 * head : 2 * head + 2, query, key] = biases[:, key, None]
        return args, kwargs | {"attention_mask": bias}

    hooks = [layer.self_attn.register_forward_pre_hook(attend, with_kwargs=True) for layer in model.model.layers]
    logits = model(ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits


def next_token_loss(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.fixture
def ids():
    return torch.randint(0, 50, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def test_training_biases_keys_behind_the_window_by_the_log_of_their_utility(ids):
    model = gated().train()
    expected = dense_logits(stock(), model.adapters(), ids, torch.log)
    wanted = torch.autograd.grad(next_token_loss(expected, ids), [adapter.weight for adapter in model.adapters()])
    logits = model(ids, use_cache=False, gate_mode=GateMode(noise_seeds=[5, 6])).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(next_token_loss(logits, ids), [adapter.weight for adapter in model.adapters()])
    for one, other in zip(found, wanted, strict=True):
        assert one[::2].abs().max() > 1e-3
        torch.testing.assert_close(one[::2], other[::2], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.7])
def test_another_offset_is_another_threshold_on_the_utility(ids, threshold):
    model = gated().eval()
    offset = OFFSET - torch.logit(torch.tensor(threshold)).item()
    model.compression = dataclasses.replace(model.compression, decision_offset=offset)

    def admit(utilities):
        return torch.where(utilities >= threshold, 0.0, -1e9)

    with torch.no_grad():
        expected = dense_logits(stock(), model.adapters(), ids, admit)
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)


def test_the_text_alone_teaches():
    training = composed("compression=sp_kv", "training=sp_kv", "model=somewhere").training
    assert training.ratio_weight == 0 and training.distillation is None and training.ratio_control is None
    assert not training.gates_only and training.calibrate and not GATES.noise and GATES.temperature == 1
