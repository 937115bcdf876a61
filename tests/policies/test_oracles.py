"""The oracles of the training-free methods against stock models."""

import pytest
import torch
from oracles.policies import run


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_decoder_gives_the_stock_models_answers(make_stock, make_prompts, family):
    assert_uncompressed(make_stock(family), "LocalWindow", *make_prompts(11, 4), budget={"tokens": 14})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("Quest", {"page_size": 4, "dense_layers": 1}),
        ("OmniKV", {"filter_layers": [0]}),
        ("InfLLM", {"block_size": 4, "representatives": 2, "initial": 3, "local": 8, "chunk": 7}),
    ],
)
def test_what_reads_less_holds_everything_and_is_exact_while_all_fits(make_stock, make_prompts, method, options):
    model, (prompt, continuation) = make_stock(num_layers=3), make_prompts(40, 4)
    assert_uncompressed(model, method, prompt, continuation, {"tokens": 43}, **options)
    few, full = (run(model, method, prompt, continuation, {"tokens": tokens}, **options) for tokens in (15, 43))
    assert (few.log_probs[1:] - full.log_probs[1:]).abs().max() > 0.1
    assert few.positions == [[list(range(43))] * 2] * 3


def assert_uncompressed(model, method, prompt, continuation, budget, **options):
    trace = run(model, method, prompt, continuation, budget, **options)
    fed = prompt + continuation[:-1]
    with torch.no_grad():
        logits = model(torch.tensor([fed])).logits[0, len(prompt) - 1 :]
    torch.testing.assert_close(trace.log_probs.float(), logits.log_softmax(-1), rtol=1e-4, atol=1e-4)
    assert (trace.slots == len(fed)).all()
