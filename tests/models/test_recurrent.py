"""Retrofits of models some of whose layers have no attention: what their states need beside `test_hybrid.py`."""

from __future__ import annotations

import pytest
import torch
from models.test_hybrid import CLOSE_STATES, CLOSED, RECURRENT, compressed, parallel
from runtime.test_recurrent import NONE, recurrent
from runtime.test_windows import FULL, texts

from dmc import Engine, SamplingParams, retrofit
from dmc.compression import CompressionConfig
from dmc.models.gqa import merge_kv_heads
from dmc.models.masked_attention import Documents
from dmc.models.modeling import for_unpadded
from dmc.models.tensor_parallel import check_divides


@pytest.mark.parametrize("family", RECURRENT)
def test_documents_do_not_leak_through_states(family):
    """Of stock teachers and of compressed models alike; gradients neither."""
    first, second, third = texts(50, 1, 40)
    starts = torch.zeros(2, 91, dtype=torch.bool)
    starts[0, [0, 50, 51]] = True
    starts[1, 0] = True
    documents, ids = Documents.from_starts(starts), torch.tensor([first + second + third, texts(91, seed=5)[0]])
    teacher = for_unpadded(recurrent(family))
    for model in (teacher, compressed(family, delay=4), retrofit(recurrent(family), CompressionConfig(**CLOSED))):
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        logits = model(inputs_embeds=embedded, documents=documents, use_cache=False).logits
        for tokens, found in (
            (first, logits[0, :50]), (second, logits[0, 50:51]), (third, logits[0, 51:]), (ids[1].tolist(), logits[1]),
        ):  # fmt: skip
            torch.testing.assert_close(found.log_softmax(-1), parallel(model, tokens), atol=CLOSE_STATES, rtol=0)
        (gradient,) = torch.autograd.grad(logits[0, 60:].square().sum(), embedded)
        assert gradient[0, 51:].abs().sum() > 0 and not gradient[0, :51].any() and not gradient[1].any()


def test_a_stock_model_runs_and_generates_as_before_once_it_has_seen_documents():
    model, (tokens,) = recurrent("qwen3_next"), texts(40)
    ids, mask = torch.tensor([tokens, [0] * 9 + tokens[9:]]), torch.ones(2, 40, dtype=torch.long)
    mask[1, :9] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    before = model.generate(ids, **options)
    for_unpadded(model)
    model.set_attn_implementation("sdpa")
    assert torch.equal(model.generate(ids, **options), before)
    greedy = SamplingParams(max_new_tokens=6, temperature=0)
    assert Engine(model).generate([tokens], greedy)[0].token_ids == before[0, 40:].tolist()


def test_heads_merge_where_there_is_attention():
    model = recurrent("qwen3_next")
    for attention in (layer.self_attn for layer in model.model.layers if hasattr(layer, "self_attn")):
        for projection in (attention.k_proj, attention.v_proj):
            projection.weight.data[16:] = projection.weight.data[:16]
    (tokens,) = texts(30)
    expected = parallel(model, tokens)
    torch.testing.assert_close(parallel(merge_kv_heads(model, 1), tokens), expected, atol=CLOSE_STATES, rtol=0)


def test_what_states_do_not_go_with_is_refused_in_one_line():
    config = recurrent("qwen3_5_text").config
    for sizes in ((2, 1), (1, 2)):
        with pytest.raises(ValueError, match=r"layer 0 of this qwen3_5_text model has no attention.* 2 ranks") as it:
            check_divides(config, *sizes)
        assert "\n" not in str(it.value)
    with pytest.raises(NotImplementedError, match="layer 0 of this qwen3_next model has no attention, nor have others"):
        retrofit(recurrent("qwen3_next", layer_types=[NONE] * 4), CompressionConfig())
    assert recurrent("qwen3_next").config.layer_types.count(FULL) == 2
