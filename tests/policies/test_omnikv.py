"""OmniKV against its oracle, its arithmetic, and its two pools."""

import pytest
import torch
from oracles.decoder import Decoder
from oracles.policies.omnikv import filter_layers_of, is_full

from dmc import Engine, SamplingParams
from dmc.budget import Budget
from dmc.policies import OmniKV
from dmc.policies.omnikv import (
    default_filter_layers,
    prompt_share,
    reads_all,
    selection_scores,
    selector_weights,
)

TOLERANCE = 1e-4
PROMPT_LENGTHS, CONTINUATION_LENGTHS = (41, 23), (9, 6)
LLAMA_3_8B, YI_9B, LLAMA_3_70B = (32, (2, 8, 18)), (48, (6, 11, 30)), (80, (4, 19, 41))


@pytest.fixture
def texts(make_prompts):
    return make_prompts(*PROMPT_LENGTHS), make_prompts(*CONTINUATION_LENGTHS, seed=2)


def test_default_filter_layers_agree_with_the_oracle():
    for num_layers in range(1, 90):
        filters = default_filter_layers(num_layers)
        assert list(filters) == list(filter_layers_of(num_layers))
        assert [reads_all(i, filters) for i in range(num_layers)] == [is_full(i, filters) for i in range(num_layers)]


def test_layers_of_llama_3_8b():
    num_layers, filters = LLAMA_3_8B
    assert default_filter_layers(num_layers) == filters
    assert [i for i in range(num_layers) if reads_all(i, filters)] == [0, 1, 2, 3, 8, 9, 18, 19]
    policy = OmniKV(budget=Budget(tokens=9)).fitted(num_layers, 16)
    assert policy.sparse_layers(num_layers) == {2: [4, 5, 6, 7], 8: list(range(10, 18)), 18: list(range(20, 32))}


def test_worked_numbers_of_memory_shares():
    assert prompt_share(0.3, *LLAMA_3_8B) == pytest.approx(1 / 15)
    assert prompt_share(0.2, *LLAMA_3_70B) == pytest.approx(0.08571, abs=1e-5)
    assert prompt_share(0.3, 48, (3, 11, 30)) == pytest.approx(0.13846, abs=1e-5)
    assert prompt_share(0.262, *LLAMA_3_8B) == pytest.approx(2048 / 131072, abs=1e-3)
    assert int(739 * prompt_share(0.3, *YI_9B)) == 49
    with pytest.raises(ValueError, match=r"memory=0.25: the layers that read everything hold 0.25 of the cache"):
        prompt_share(0.25, *YI_9B)


def test_a_share_of_memory_gives_the_budget():
    policy = OmniKV(memory=0.3).fitted(32, 16)
    assert [policy.num_chosen(length) for length in (150, 739, 15, 3)] == [10, 49, 1, 1]
    assert OmniKV(memory=1.0).fitted(32, 16).num_chosen(150) == 150
    assert OmniKV(memory=0.5).fitted(2, 16).num_chosen(150) == 150  # every layer reads all


def test_worked_numbers_of_selectors():
    attention = torch.tensor([[(0.1, 0.2, 0.7), (0.3, 0.3, 0.4)], [(0.6, 0.1, 0.3), (0.05, 0.9, 0.05)]])[None]
    for selector, expected in (
        ("uniform", (0.9, 1.1, 1.1)),
        ("exponential", (0.3, 0.5, 0.375)),
        ("last", (0.3, 0.9, 0.4)),
    ):
        weights = selector_weights(torch.tensor([[1, 0]]), selector)
        torch.testing.assert_close(selection_scores(attention, weights)[0], torch.tensor(expected))


@pytest.mark.parametrize("memory", [0.6, 0.9])
def test_fast_memory_is_the_promised_share(make_stock, make_prompts, memory):
    model, (prompt,) = make_stock(num_layers=8), make_prompts(160)
    engine = Engine(model, policy=OmniKV(memory=memory, filter_layers=(0, 4), offload=True))
    full = 160 * 8 * 2 * engine.cache.layout.entry_bytes
    for generated in (0, 16):
        params = SamplingParams(max_new_tokens=generated + 1, temperature=0)
        (stats,) = (generation.stats for generation in engine.generate([prompt], params))
        assert stats.bytes_fast - engine.cache.state_bytes == pytest.approx(memory * full + generated * full / 160)
        assert stats.bytes_allocated - stats.bytes_fast == full // 2  # the prompt in four of eight layers
        assert (stats.slots == 160 + generated).all()


def sparse_prefill(model, prompt, filter_layers, chunk, chunks_read):
    """Log-probs after each token of a prompt, float64, in masks over the whole of it."""
    decoder, length = Decoder(model), len(prompt)
    place = torch.arange(length)
    chunk_of = place // chunk
    allowed = place[None] <= place[:, None]
    causal, choice = allowed, allowed

    def attend(index, query, key, value, first):
        nonlocal choice
        query, key = decoder.rotate(query, place), decoder.rotate(key, place)
        group = len(query) // len(key)
        key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
        logits = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
        if index in filter_layers:
            choice = causal.clone()
            for begin in range(0, length, chunk):
                if begin > chunks_read * chunk:
                    past = logits[:, chunk_of == begin // chunk, :begin].softmax(-1).amax(0).sum(0)
                    dropped = past.argsort(descending=True)[chunks_read * chunk :]
                    choice[begin : begin + chunk, dropped] = False
        visible = causal if is_full(index, filter_layers) else choice
        return logits.masked_fill(~visible, -torch.inf).softmax(-1) @ value

    return decoder.feed(prompt, 0, attend)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("chunks_read", [1, 2])
def test_sparse_prefill_agrees_with_masked_attention(make_stock, make_prompts, offload, chunks_read):
    model, prompts, continuations = make_stock(num_layers=6), make_prompts(45, 27, 27), make_prompts(1, 1, 1, seed=2)
    options = {"filter_layers": (0, 3), "chunk": 8, "chunks_read": chunks_read}
    for chunk in (None, 16):
        policy = OmniKV(budget=Budget(ratio=2), prefill="sparse", offload=offload, **options)
        engine = Engine(model, policy=policy, prefill_chunk_size=chunk)
        for prompt, scores in zip(prompts, engine.score(prompts, continuations), strict=True):
            expected = sparse_prefill(model, prompt, **options)[-1:]
            torch.testing.assert_close(scores.double(), expected, rtol=0, atol=TOLERANCE)


def test_sparse_prefill_is_exact_while_a_chunk_reads_all(make_stock, texts):
    model = make_stock(num_layers=3)
    policy = OmniKV(budget=Budget(tokens=99), filter_layers=(0,), prefill="sparse", chunk=16, chunks_read=2)
    expected = torch.cat(Engine(model).score(*texts))
    actual = torch.cat(Engine(model, policy=policy).score(*texts))
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)
