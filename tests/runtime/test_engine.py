import copy
import math

import pytest
import torch

from dmc import Engine, SamplingParams, retrofit

TOLERANCE = 1e-4
LENGTHS = (5, 33, 18, 1)
GREEDY = SamplingParams(max_new_tokens=20, temperature=0)
BLOCK_BYTES = 16 * 2 * 16 * 4  # block size, key and value, head_dim, float32


def scores(engine, prompts, continuations):
    return torch.cat(engine.score(prompts, continuations))


def tokens_of(generations):
    return [generation.token_ids for generation in generations]


class CharacterTokenizer:
    """As much of a tokenizer as the engine uses: one token for each character."""

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(character) - 33 for character in text]}

    def decode(self, tokens, skip_special_tokens):
        assert skip_special_tokens
        return "".join(chr(token + 33) for token in tokens)


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_page_size_changes_nothing_but_bytes(block_size, make_compressed, make_prompts):
    model, prompts = make_compressed(), make_prompts(*LENGTHS)
    expected = Engine(model).generate(prompts, GREEDY)
    generations = Engine(model, block_size=block_size).generate(prompts, GREEDY)
    assert tokens_of(generations) == tokens_of(expected)
    for ours, theirs in zip(generations, expected, strict=True):
        assert torch.equal(ours.stats.slots, theirs.stats.slots)
        assert ours.stats.bytes_used == theirs.stats.bytes_used
        assert ours.stats.bytes_allocated >= theirs.stats.bytes_allocated


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_stock_model_in_the_engine_equals_its_own_generate(family, make_stock, make_prompts):
    model, prompts = make_stock(family), make_prompts(*LENGTHS)
    with torch.no_grad():
        expected = [
            model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
            for prompt in prompts
        ]
        logits = model(torch.tensor([prompts[1]]), use_cache=False).logits[0].log_softmax(-1)
    engine = Engine(model, prefill_chunk_size=7)
    generations = engine.generate(prompts, GREEDY)
    assert tokens_of(generations) == expected
    for prompt, generation in zip(prompts, generations, strict=True):
        assert (generation.stats.slots == len(prompt) + 19).all()
        assert generation.stats.achieved_ratio == 1
    scored = scores(engine, [prompts[1][:1]], [[*prompts[1][1:], 0]])
    torch.testing.assert_close(scored, logits, rtol=0, atol=TOLERANCE)


def test_a_stock_model_still_serves_transformers_after_the_engine(make_stock, make_prompts):
    model, prompts = make_stock(), make_prompts(9, 9)
    batch = {
        "input_ids": torch.tensor(prompts),
        "attention_mask": torch.tensor([[0] * 3 + [1] * 6, [1] * 9]),
        "max_new_tokens": 9,
        "do_sample": False,
    }
    before = model.generate(**batch).tolist()
    engine = Engine(model)
    assert model.generate(**batch).tolist() == before
    assert (
        engine.generate([prompts[0][3:]], SamplingParams(max_new_tokens=9, temperature=0))[0].token_ids == before[0][9:]
    )


def test_open_gates_hold_one_entry(make_compressed, make_prompts):
    engine = Engine(make_compressed(gates={"decision_offset": -1e6}))
    for generation in engine.generate(make_prompts(*LENGTHS), GREEDY):
        assert (generation.stats.slots == 1).all()
        assert generation.stats.achieved_ratio == generation.stats.tokens_seen


def test_a_request_that_can_never_fit_is_refused_before_anything_runs(make_compressed, make_prompts, monkeypatch):
    engine = Engine(make_compressed(gates={"target_ratio": 1.0}), memory=4 * 2 * BLOCK_BYTES)
    monkeypatch.setattr(engine._runner, "forward", lambda *_, **__: pytest.fail("ran"))
    wanted = 4 * 3 * BLOCK_BYTES
    with pytest.raises(ValueError, match=f"a sequence of 33 tokens may need 12 blocks.*at least {wanted} bytes"):
        engine.generate(make_prompts(4, 14), GREEDY)
    with pytest.raises(ValueError, match="a sequence of 33 tokens may need 12 blocks"):
        engine.score(make_prompts(4, 14), make_prompts(20, 20))


def test_a_request_that_just_fits_runs(make_compressed, make_prompts):
    engine = Engine(make_compressed(gates={"decision_offset": 1e6}), memory=4 * 2 * BLOCK_BYTES)
    (generation,) = engine.generate(make_prompts(13), GREEDY)
    assert generation.stats.tokens_seen == 32
    assert generation.stats.bytes_allocated - generation.stats.bytes_used == 0


def test_log_probabilities_are_those_of_the_unmodified_distribution(make_compressed, make_prompts):
    engine, prompts = Engine(make_compressed()), make_prompts(9, 14)
    params = SamplingParams(max_new_tokens=15, seed=1, temperature=0.7, top_k=5, top_p=0.8)
    for prompt, generation in zip(prompts, engine.generate(prompts, params), strict=True):
        (score,) = engine.score([prompt], [generation.token_ids])
        torch.testing.assert_close(score.exp().sum(-1), torch.ones(15))
        chosen = score[torch.arange(15), generation.token_ids]
        assert generation.logprobs == pytest.approx(chosen.tolist(), abs=TOLERANCE)
        assert (score > chosen[:, None]).sum(-1).max() < 5


def test_stop_tokens_and_end_of_sequence_stop(make_compressed, make_prompts):
    model, (prompt,) = make_compressed(), make_prompts(9)
    (free,) = Engine(model).generate([prompt], GREEDY)
    assert len(free.token_ids) == 20
    stop = free.token_ids[6]
    first = free.token_ids.index(stop) + 1

    def run(**settings):
        params = SamplingParams(max_new_tokens=20, temperature=0, **settings)
        (generation,) = Engine(model).generate([prompt], params)
        assert generation.stats.tokens_seen == len(prompt) + len(generation.token_ids) - 1
        assert generation.finish_reason == ("stop" if len(generation.token_ids) < 20 else "length")
        return generation.token_ids

    assert run(stop_token_ids=(stop,)) == free.token_ids[:first]
    unused = next(token for token in range(83) if token not in free.token_ids)
    for end in (stop, [unused, stop]):
        model.generation_config.eos_token_id = end
        assert run() == free.token_ids[:first]
        assert run(ignore_eos=True) == free.token_ids
        assert run(ignore_eos=True, stop_token_ids=(stop,)) == free.token_ids[:first]


def test_a_single_token_is_generated_from_the_prompt_alone(make_compressed, make_prompts):
    engine, prompts = Engine(make_compressed()), make_prompts(9, 1)
    assert engine.generate([], GREEDY) == []
    for prompt, generation in zip(
        prompts, engine.generate(prompts, SamplingParams(max_new_tokens=1, temperature=0)), strict=True
    ):
        assert generation.stats.tokens_seen == len(prompt)
        assert len(generation.token_ids) == 1


def test_text_goes_through_the_tokenizer(make_compressed):
    model = make_compressed()
    engine = Engine(model, tokenizer=CharacterTokenizer())
    texts = ["Hello!", "KV"]
    ids = [CharacterTokenizer()(text, True)["input_ids"] for text in texts]
    by_text, by_ids = engine.generate(texts, GREEDY), Engine(model).generate(ids, GREEDY)
    assert tokens_of(by_text) == tokens_of(by_ids)
    for generation in by_text:
        assert generation.text == "".join(chr(token + 33) for token in generation.token_ids)
    assert all(generation.text is None for generation in by_ids)
    torch.testing.assert_close(engine.score(["Hello"], ["!"])[0], Engine(model).score([ids[0][:-1]], [ids[0][-1:]])[0])


def test_scores_can_be_used_in_autograd(make_compressed, make_prompts):
    (score,) = Engine(make_compressed()).score(make_prompts(5), make_prompts(4))
    weight = torch.ones(83, requires_grad=True)
    (score * weight).sum().backward()
    assert weight.grad is not None
    assert math.isfinite(weight.grad.sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models_run_and_score_in_float32(dtype, make_compressed, make_prompts):
    model, prompts, continuations = make_compressed(), make_prompts(9, 20), make_prompts(5, 5, seed=2)
    expected = scores(Engine(model), prompts, continuations)
    engine = Engine(model.to(dtype))
    assert engine.cache.fields["key_pages"].dtype == dtype
    scored = scores(engine, prompts, continuations)
    assert scored.dtype == torch.float32
    assert (scored - expected).abs().mean() < 0.2  # a decision near 0 may flip
    (generation, _) = engine.generate(prompts, GREEDY)
    assert len(generation.token_ids) == 20


@pytest.mark.parametrize("chunk", [None, 10])
def test_scoring_computes_logits_of_the_continuation_alone(chunk, make_compressed, make_prompts):
    model = make_compressed()
    rows = []
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(output.shape[1]))
    Engine(model, prefill_chunk_size=chunk).score(make_prompts(40), make_prompts(6))
    assert sum(rows) == 6


def test_a_stock_model_can_be_retrofitted_after_the_engine(make_stock, make_compressed, make_prompts):
    stock, prompts = make_stock(), make_prompts(*LENGTHS)
    Engine(stock).generate(prompts, GREEDY)
    expected = make_compressed()
    model = retrofit(stock, expected.compression)
    assert tokens_of(Engine(model).generate(prompts, GREEDY)) == tokens_of(Engine(expected).generate(prompts, GREEDY))


def test_a_long_prompt_never_holds_all_layers_uncompressed(make_compressed, make_prompts):
    model = make_compressed(num_layers=8, gates={"decision_offset": -2.0})
    engine = Engine(model, max_batch_size=1)
    (generation,) = engine.generate(make_prompts(4000), SamplingParams(max_new_tokens=1, temperature=0.0))
    assert generation.stats.achieved_ratio > 4
    layer = model.config.num_key_value_heads * 4000 // 16
    compressed = int((-(-generation.stats.slots // 16)).sum())
    assert engine.cache.allocator.num_blocks <= 2 * (compressed + layer)  # the pool grows by doubling
    assert engine.cache.allocator.num_blocks < 0.7 * 8 * layer


def test_a_served_model_still_trains_and_copies(make_stock, make_prompts):
    model = make_stock(hidden_size=64, intermediate_size=96)
    tokens = torch.tensor(make_prompts(9))
    before = model(tokens).logits.detach()
    (generation,) = Engine(model).generate(tokens.tolist(), SamplingParams(max_new_tokens=4, temperature=0.0))
    torch.testing.assert_close(model(tokens).logits, before, rtol=0, atol=0)
    model(tokens, labels=tokens).loss.backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad is not None
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        torch.testing.assert_close(other(tokens).logits, before, rtol=0, atol=1e-4)
    (again,) = Engine(other).generate(tokens.tolist(), SamplingParams(max_new_tokens=4, temperature=0.0))
    assert again.token_ids == generation.token_ids
