import copy
import math
from typing import Any

import pytest
import torch

from dmc import Engine, SamplingParams, retrofit
from dmc.runtime.allocator import OutOfBlocksError
from dmc.runtime.scheduler import ScheduledChunk
from dmc.runtime.sequence import Sequence

GATES = [
    {},
    {"window_size": 3},
    {"window_size": None},
    {"delay": 4},
    {"delay": 1, "window_size": None},
    {"action": "drop", "delay": 4},
    {"action": "drop", "delay": 16},
]
TOLERANCE = 1e-4
LENGTHS = (5, 33, 18, 1)
GREEDY = SamplingParams(max_new_tokens=20, temperature=0)
BLOCK_BYTES = 16 * 2 * 16 * 4  # block size, key and value, head_dim, float32


def name_of(gates: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in gates.items()) or "default"


def scores(engine: Engine, prompts: list[list[int]], continuations: list[list[int]]) -> torch.Tensor:
    return torch.cat(engine.score(prompts, continuations))


def tokens_of(generations: list[Any]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


class CharacterTokenizer:
    """As much of a tokenizer as the engine uses: one token for each character."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) - 33 for character in text]}

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(token + 33) for token in tokens)


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_page_size_changes_nothing_but_bytes(block_size: int, make_compressed: Any, make_prompts: Any) -> None:
    model, prompts = make_compressed(), make_prompts(*LENGTHS)
    expected = Engine(model).generate(prompts, GREEDY)
    generations = Engine(model, block_size=block_size).generate(prompts, GREEDY)
    assert tokens_of(generations) == tokens_of(expected)
    for ours, theirs in zip(generations, expected, strict=True):
        assert torch.equal(ours.stats.slots, theirs.stats.slots)
        assert ours.stats.bytes_used == theirs.stats.bytes_used
        assert ours.stats.bytes_allocated >= theirs.stats.bytes_allocated


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_stock_model_in_the_engine_equals_its_own_generate(family: str, make_stock: Any, make_prompts: Any) -> None:
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


def test_a_stock_model_still_serves_transformers_after_the_engine(make_stock: Any, make_prompts: Any) -> None:
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


def test_open_gates_hold_one_entry(make_compressed: Any, make_prompts: Any) -> None:
    engine = Engine(make_compressed(gates={"decision_offset": -1e6}))
    for generation in engine.generate(make_prompts(*LENGTHS), GREEDY):
        assert (generation.stats.slots == 1).all()
        assert generation.stats.achieved_ratio == generation.stats.tokens_seen


@pytest.mark.parametrize("gates", GATES, ids=name_of)
def test_stats_agree_with_each_other(gates: dict, make_compressed: Any, make_prompts: Any) -> None:
    engine = Engine(make_compressed(gates=gates))
    for generation in engine.generate(make_prompts(*LENGTHS), GREEDY):
        stats = generation.stats
        assert stats.slots.shape == (2, 2)
        assert stats.slots.dtype == torch.int64
        assert stats.achieved_ratio == pytest.approx(stats.tokens_seen * 4 / int(stats.slots.sum()))
        assert 0 < stats.bytes_used <= stats.bytes_allocated
        stream = stats.slots - min(stats.tokens_seen, gates.get("delay", 0))
        pages = (stats.bytes_allocated - stats.bytes_used) + int(stream.sum()) * BLOCK_BYTES // 16
        assert pages == int((-(-stream // 16)).sum()) * BLOCK_BYTES


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("verb", ["generate", "score"])
def test_blocks_return_when_a_step_fails(
    verb: str, error: type[BaseException], make_compressed: Any, make_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(make_compressed(), max_batch_size=2, prefill_chunk_size=8)
    prompts = make_prompts(*LENGTHS)
    expected = tokens_of(engine.generate(prompts, GREEDY))
    forward, calls = engine._runner.forward, iter(range(100))

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 2:
            raise error("the power went")
        return forward(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "forward", failing)
        if error is RuntimeError and verb == "generate":  # of several: each goes on
            assert tokens_of(engine.generate(prompts, GREEDY)) == expected
        else:
            with pytest.raises(error, match="the power went"):
                engine.generate(prompts, GREEDY) if verb == "generate" else engine.score(prompts[1:2], [prompts[1]])
    assert engine.blocks_in_use == 0
    assert tokens_of(engine.generate(prompts, GREEDY)) == expected  # nothing of the failed call is left


@pytest.mark.parametrize("broken", [{"seed": "x"}, {"seed": 2**70}])
def test_nothing_waits_after_a_request_that_cannot_start(broken: dict, make_compressed: Any, make_prompts: Any) -> None:
    engine, prompts = Engine(make_compressed()), make_prompts(4, 5)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        engine.generate(prompts, [GREEDY, SamplingParams(**broken)])
    (alone,) = engine.generate(prompts[:1], GREEDY)
    assert len(alone.token_ids) == 20
    assert engine.blocks_in_use == 0


def test_unknown_tokens_are_refused_before_anything_runs(make_compressed: Any, make_prompts: Any) -> None:
    engine = Engine(make_compressed())
    for unknown in (83, -1):
        with pytest.raises(ValueError, match="the model knows 0 to 82"):
            engine.generate([*make_prompts(4), [5, unknown]], GREEDY)
    assert engine.blocks_in_use == 0


@pytest.mark.parametrize("chunk", [None, 6])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "top_p": 0.9}])
@pytest.mark.parametrize("gates", [{}, {"window_size": None}, {"action": "drop", "delay": 4}], ids=name_of)
def test_preempted_sequences_continue_as_if_they_had_never_stopped(
    gates: dict, sampling: dict, chunk: int | None, make_compressed: Any, make_prompts: Any
) -> None:
    model, prompts = make_compressed(gates=gates), make_prompts(30, 12, 25, 8)
    params = [SamplingParams(max_new_tokens=40, seed=row, **sampling) for row in range(4)]
    free = Engine(model).generate(prompts, params)
    memory = 4 * -(-(30 + 39) // 16) * BLOCK_BYTES  # the longest sequence fits alone
    tight = Engine(model, memory=memory, prefill_chunk_size=chunk)
    generations = tight.generate(prompts, params)
    assert sum(generation.stats.num_preemptions for generation in generations) > 0
    assert all(generation.stats.num_preemptions == 0 for generation in free)
    for ours, theirs in zip(generations, free, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=TOLERANCE)
        assert torch.equal(ours.stats.slots, theirs.stats.slots)
        assert ours.stats.tokens_seen == theirs.stats.tokens_seen
    assert tight.blocks_in_use == 0
    assert tight.cache.key_pages.nbytes + tight.cache.value_pages.nbytes <= memory


def test_a_request_that_can_never_fit_is_refused_before_anything_runs(
    make_compressed: Any, make_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(make_compressed(gates={"target_ratio": 1.0}), memory=4 * 2 * BLOCK_BYTES)
    monkeypatch.setattr(engine._runner, "forward", lambda *_, **__: pytest.fail("ran"))
    wanted = 4 * 3 * BLOCK_BYTES
    with pytest.raises(ValueError, match=f"a sequence of 33 tokens may need 12 blocks.*at least {wanted} bytes"):
        engine.generate(make_prompts(4, 14), GREEDY)
    with pytest.raises(ValueError, match="a sequence of 33 tokens may need 12 blocks"):
        engine.score(make_prompts(4, 14), make_prompts(20, 20))


def test_a_request_that_just_fits_runs(make_compressed: Any, make_prompts: Any) -> None:
    engine = Engine(make_compressed(gates={"decision_offset": 1e6}), memory=4 * 2 * BLOCK_BYTES)
    (generation,) = engine.generate(make_prompts(13), GREEDY)
    assert generation.stats.tokens_seen == 32
    assert generation.stats.bytes_allocated - generation.stats.bytes_used == 0


def test_a_failed_reservation_leaves_the_cache_as_it_was(make_compressed: Any, make_prompts: Any) -> None:
    engine = Engine(make_compressed(), memory=4 * 2 * BLOCK_BYTES)
    sequence = Sequence(make_prompts(20)[0], wanted=19)
    engine._scheduler.submit(sequence)
    engine._runner.forward(engine._scheduler.next_segments())
    sequence.tokens += make_prompts(30)[0]
    cache = engine.cache
    state = [cache.lengths, cache.block_tables, cache.key_pages, cache.fields["history_key"], cache.tokens_seen]
    before = [each.clone() for each in state]
    with pytest.raises(OutOfBlocksError):
        engine._runner.forward([ScheduledChunk(sequence, sequence.tokens[20:], first_logit_position=29)])
    assert all(torch.equal(*pair) for pair in zip(before, state, strict=True))
    assert sequence.num_computed_tokens == 20
    engine._scheduler.reset()
    assert engine.blocks_in_use == 0


def test_seeds_make_sampling_reproducible_in_any_company(make_compressed: Any, make_prompts: Any) -> None:
    engine, prompts = Engine(make_compressed(), max_batch_size=2), make_prompts(9, 14, 3)
    params = [SamplingParams(max_new_tokens=15, seed=seed) for seed in (1, 2, 3)]
    together = tokens_of(engine.generate(prompts, params))
    assert tokens_of(engine.generate(prompts, params)) == together
    assert tokens_of(engine.generate(prompts[::-1], params[::-1]))[::-1] == together
    assert tokens_of(engine.generate(prompts[:1], SamplingParams(max_new_tokens=15, seed=4))) != together[:1]


def test_log_probabilities_are_those_of_the_unmodified_distribution(make_compressed: Any, make_prompts: Any) -> None:
    engine, prompts = Engine(make_compressed()), make_prompts(9, 14)
    params = SamplingParams(max_new_tokens=15, seed=1, temperature=0.7, top_k=5, top_p=0.8)
    for prompt, generation in zip(prompts, engine.generate(prompts, params), strict=True):
        (score,) = engine.score([prompt], [generation.token_ids])
        torch.testing.assert_close(score.exp().sum(-1), torch.ones(15))
        chosen = score[torch.arange(15), generation.token_ids]
        assert generation.logprobs == pytest.approx(chosen.tolist(), abs=TOLERANCE)
        assert (score > chosen[:, None]).sum(-1).max() < 5


def test_stop_tokens_and_end_of_sequence_stop(make_compressed: Any, make_prompts: Any) -> None:
    model, (prompt,) = make_compressed(), make_prompts(9)
    (free,) = Engine(model).generate([prompt], GREEDY)
    assert len(free.token_ids) == 20
    stop = free.token_ids[6]
    first = free.token_ids.index(stop) + 1

    def run(**settings: Any) -> list[int]:
        params = SamplingParams(max_new_tokens=20, temperature=0, **settings)
        (generation,) = Engine(model).generate([prompt], params)
        assert generation.stats.tokens_seen == len(prompt) + len(generation.token_ids) - 1
        return generation.token_ids

    assert run(stop_token_ids=(stop,)) == free.token_ids[:first]
    unused = next(token for token in range(83) if token not in free.token_ids)
    for end in (stop, [unused, stop]):
        model.generation_config.eos_token_id = end
        assert run() == free.token_ids[:first]
        assert run(ignore_eos=True) == free.token_ids
        assert run(ignore_eos=True, stop_token_ids=(stop,)) == free.token_ids[:first]


def test_a_single_token_is_generated_from_the_prompt_alone(make_compressed: Any, make_prompts: Any) -> None:
    engine, prompts = Engine(make_compressed()), make_prompts(9, 1)
    for prompt, generation in zip(
        prompts, engine.generate(prompts, SamplingParams(max_new_tokens=1, temperature=0)), strict=True
    ):
        assert generation.stats.tokens_seen == len(prompt)
        assert len(generation.token_ids) == 1


def test_text_goes_through_the_tokenizer(make_compressed: Any) -> None:
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


def test_scores_can_be_used_in_autograd(make_compressed: Any, make_prompts: Any) -> None:
    (score,) = Engine(make_compressed()).score(make_prompts(5), make_prompts(4))
    weight = torch.ones(83, requires_grad=True)
    (score * weight).sum().backward()
    assert weight.grad is not None
    assert math.isfinite(weight.grad.sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models_run_and_score_in_float32(
    dtype: torch.dtype, make_compressed: Any, make_prompts: Any
) -> None:
    model, prompts, continuations = make_compressed(), make_prompts(9, 20), make_prompts(5, 5, seed=2)
    expected = scores(Engine(model), prompts, continuations)
    engine = Engine(model.to(dtype))
    assert engine.cache.key_pages.dtype == dtype
    scored = scores(engine, prompts, continuations)
    assert scored.dtype == torch.float32
    assert (scored - expected).abs().mean() < 0.2  # a decision near 0 may flip
    (generation, _) = engine.generate(prompts, GREEDY)
    assert len(generation.token_ids) == 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size=0: expected a whole number >= 1"),
        ({"prefill_chunk_size": 0}, "prefill_chunk_size=0: expected a whole number >= 1"),
        ({"prefill_chunk_size": -4}, "prefill_chunk_size=-4"),
        ({"token_budget": 0}, "token_budget=0: expected a whole number >= 1"),
        ({"memory": -1}, "memory=-1: expected a whole number of bytes > 0"),
        ({"memory": "lots"}, "memory='lots'"),
        ({"block_size": 48}, "block_size=48: expected one of 16, 32, 64, 128"),
        ({"kernels": "magic"}, "kernels='magic' is unknown: expected 'auto' or one of reference"),
    ],
)
def test_options_out_of_range_are_refused(options: dict, message: str, make_compressed: Any) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(make_compressed(), **options)


def test_bad_requests_are_refused(make_compressed: Any) -> None:
    engine = Engine(make_compressed())
    with pytest.raises(ValueError, match="a prompt or continuation is empty"):
        engine.generate([[1], []], GREEDY)
    with pytest.raises(ValueError, match="a prompt or continuation is empty"):
        engine.score([[1]], [[]])
    with pytest.raises(ValueError, match="the engine has no tokenizer"):
        engine.generate(["text"], GREEDY)
    with pytest.raises(ValueError, match="2 sampling parameters for 1 prompts"):
        engine.generate([[1]], [GREEDY, GREEDY])
    with pytest.raises(ValueError, match="1 prompts and 2 continuations"):
        engine.score([[1]], [[1], [2]])
    assert engine.generate([], GREEDY) == []
    assert engine.blocks_in_use == 0


@pytest.mark.parametrize("chunk", [None, 10])
def test_scoring_computes_logits_of_the_continuation_alone(
    chunk: int | None, make_compressed: Any, make_prompts: Any
) -> None:
    model = make_compressed()
    rows = []
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(output.shape[1]))
    Engine(model, prefill_chunk_size=chunk).score(make_prompts(40), make_prompts(6))
    assert sum(rows) == 6


def test_a_stock_model_can_be_retrofitted_after_the_engine(
    make_stock: Any, make_compressed: Any, make_prompts: Any
) -> None:
    stock, prompts = make_stock(), make_prompts(*LENGTHS)
    Engine(stock).generate(prompts, GREEDY)
    expected = make_compressed()
    model = retrofit(stock, expected.compression)
    assert tokens_of(Engine(model).generate(prompts, GREEDY)) == tokens_of(Engine(expected).generate(prompts, GREEDY))


def test_pool_that_grew_in_a_forward_pass_takes_its_blocks_back(make_compressed):
    engine = Engine(make_compressed())
    first = engine.cache.allocator.num_blocks
    prompts = [list(range(70)) * 6 for _ in range(8)]
    for _ in range(2):
        engine.generate(prompts, SamplingParams(max_new_tokens=2, temperature=0.0))
        assert engine.cache.allocator.num_blocks > first
        assert engine.blocks_in_use == 0


def test_a_long_prompt_never_holds_all_layers_uncompressed(make_compressed: Any, make_prompts: Any) -> None:
    model = make_compressed(num_layers=8, gates={"decision_offset": -2.0})
    engine = Engine(model, max_batch_size=1)
    (generation,) = engine.generate(make_prompts(4000), SamplingParams(max_new_tokens=1, temperature=0.0))
    assert generation.stats.achieved_ratio > 4
    layer = model.config.num_key_value_heads * 4000 // 16
    compressed = int((-(-generation.stats.slots // 16)).sum())
    assert engine.cache.allocator.num_blocks <= 2 * (compressed + layer)  # the pool grows by doubling
    assert engine.cache.allocator.num_blocks < 0.7 * 8 * layer


def test_a_served_model_still_trains_and_copies(make_stock: Any, make_prompts: Any) -> None:
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
