import copy

import pytest
import torch

from dmc import Engine, SamplingParams, load_model, retrofit
from dmc.compression import CompressionConfig
from dmc.models import merge_kv_heads
from dmc.models.gqa import merge_heads_of_config

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def log_probs(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)


@pytest.mark.parametrize(("family", "num_heads"), zip(FAMILIES, (1, 2, 1, 2), strict=True))
def test_heads_that_are_equal_within_their_group_change_nothing(family, num_heads, make_stock, make_prompts):
    model, tokens = make_stock(family, group=1), make_prompts(30)[0]
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                for parameter in projection.parameters():
                    heads = parameter.unflatten(0, (num_heads, -1, 16))
                    heads.copy_(heads[:, :1].clone().expand_as(heads))
    expected = log_probs(model, tokens)
    merged = merge_kv_heads(model, num_heads)
    assert merged is model
    assert type(merged) is type(make_stock(family))
    assert merged.config.num_key_value_heads == num_heads
    torch.testing.assert_close(log_probs(merged, tokens), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_new_heads_are_the_means_of_contiguous_groups_and_nothing_else_changes(family, make_stock):
    model = make_stock(family, group=1)
    before = copy.deepcopy(model.state_dict())
    after = merge_kv_heads(model, 2).state_dict()
    assert list(after) == list(before)
    for name, value in before.items():
        expected = value
        if ".k_proj." in name or ".v_proj." in name:
            heads = value.split(16)
            expected = torch.cat([(heads[0] + heads[1]) / 2, (heads[2] + heads[3]) / 2])
        torch.testing.assert_close(after[name], expected, rtol=0, atol=1e-6)
    assert ("model.layers.0.self_attn.v_proj.bias" in before) == (family == "qwen2")
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_merged_model_is_served_saved_and_retrofitted_as_any_other(make_stock, make_prompts, tmp_path):
    model, tokens = merge_kv_heads(make_stock(group=1), 2), make_prompts(25)[0]
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert torch.equal(log_probs(loaded, tokens), log_probs(model, tokens))
    (generation,) = Engine(loaded).generate([tokens], SamplingParams(max_new_tokens=2, temperature=0.0))
    assert generation.stats.slots.shape == (2, 2)
    assert generation.token_ids[0] == int(log_probs(model, tokens)[-1].argmax())
    gated = retrofit(loaded, CompressionConfig(decision_offset=0.0))
    torch.testing.assert_close(
        Engine(gated).score([tokens[:-1]], [[tokens[-1], 0]])[0], log_probs(gated, tokens)[-2:], rtol=0, atol=1e-4
    )


def test_sixteen_bit_heads_are_averaged_in_float32(make_stock):
    model = make_stock(group=1).bfloat16()
    heads = model.model.layers[1].self_attn.v_proj.weight.detach().float().unflatten(0, (4, 16))
    merged = merge_kv_heads(model, 1).model.layers[1].self_attn.v_proj.weight
    assert merged.dtype == torch.bfloat16
    assert torch.equal(merged, heads.mean(0).bfloat16())


@pytest.mark.parametrize("count", [3, 0, -2, 8])
def test_groups_of_unequal_size_are_refused(count, make_stock):
    stock = make_stock(group=1)
    message = f"4 KV heads cannot be merged into {count} groups of equal size: expected one of 1, 2, 4"
    with pytest.raises(ValueError, match=message):
        merge_kv_heads(stock, count)
    assert stock.config.num_key_value_heads == 4
    with pytest.raises(ValueError, match=message):
        merge_heads_of_config(stock.config, count)


def test_gated_models_are_refused(make_compressed):
    with pytest.raises(ValueError, match="merge the heads of the stock model, then retrofit it"):
        merge_kv_heads(make_compressed(), 1)
