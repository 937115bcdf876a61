"""Submit, step, abort, stream and sessions."""

import itertools
import math

import pytest
import torch

from dmc import Engine, SamplingParams, policies
from dmc.budget import Budget

GREEDY = SamplingParams(max_new_tokens=12, temperature=0)
BLOCK_BYTES = 16 * 2 * 16 * 4  # block size, key and value, head_dim, float32
HALF = Budget(ratio=2)
METHODS = [None, {}, {"window_size": None}, {"action": "drop", "delay": 4}]


class Letters:
    """One token for each character; a special one at the start of a text."""

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [82] * add_special_tokens + [ord(letter) - 33 for letter in text]}

    def decode(self, tokens, skip_special_tokens):
        return "".join(chr(token + 33) for token in tokens if token != 82)


def build(gates, make_stock, make_compressed):
    return make_stock() if gates is None else make_compressed(gates=gates)


def run(engine, request):
    while request.generation is None:
        engine.step()
    return request.generation


def test_steps_bring_the_tokens_of_generate(make_compressed, make_prompts):
    engine, prompts = Engine(make_compressed(), tokenizer=Letters(), prefill_chunk_size=8), make_prompts(5, 20, 9)
    expected = engine.generate(prompts, GREEDY)
    requests = [engine.submit(prompt, GREEDY) for prompt in prompts]
    assert engine.blocks_in_use == 0
    events = []
    while any(request.generation is None for request in requests):
        events += engine.step()
    assert engine.step() == []
    for request, generation in zip(requests, expected, strict=True):
        mine = [event for event in events if event.request is request]
        assert [event.token_id for event in mine] == request.generation.token_ids == generation.token_ids
        assert [event.logprob for event in mine] == request.generation.logprobs
        assert "".join(event.text for event in mine) == request.generation.text == generation.text
        assert [event.finish_reason for event in mine] == [None] * 11 + ["length"]
        assert generation.finish_reason == "length"


@pytest.mark.parametrize("length", [1024, 1025])
def test_a_prompt_that_joins_others_leaves_them_their_blocks(length, make_stock, make_prompts):
    """The pool of 256 blocks is full when the second prompt comes: 64 blocks in each of 2 layers and 2 heads."""
    model, prompts = make_stock(), make_prompts(length, 5)
    expected = Engine(model, memory=2**23).generate(prompts, GREEDY)
    engine = Engine(model)
    requests = [engine.submit(prompts[0], GREEDY)]
    engine.step()
    requests.append(engine.submit(prompts[1], GREEDY))
    engine.step()
    assert engine.blocks_in_use == int((-(-engine.cache.lengths // 16)).sum())
    for request, generation in zip(requests, expected, strict=True):
        assert run(engine, request).token_ids == generation.token_ids


def test_generate_and_score_run_beside_submitted_requests(make_compressed, make_prompts):
    engine, prompts = Engine(make_compressed(), max_batch_size=2), make_prompts(5, 20, 9)
    expected = [generation.token_ids for generation in engine.generate(prompts, GREEDY)]
    request = engine.submit(prompts[0], GREEDY)
    engine.step()
    assert [generation.token_ids for generation in engine.generate(prompts[1:], GREEDY)] == expected[1:]
    (score,) = engine.score(prompts[1:2], expected[1:2])
    assert score.argmax(-1).tolist() == expected[1]
    assert run(engine, request).token_ids == expected[0]


def test_abort_returns_the_blocks_and_keeps_what_there_is(make_compressed, make_prompts):
    engine, prompts = Engine(make_compressed(), tokenizer=Letters(), max_batch_size=2), make_prompts(5, 20, 9)
    expected = engine.generate(prompts, GREEDY)
    running, other, waiting = (engine.submit(prompt, GREEDY) for prompt in prompts)
    for _ in range(4):
        engine.step()
    for request in (running, waiting, running):
        engine.abort(request)
    assert running.generation.token_ids == expected[0].token_ids[:4]
    assert running.generation.text == Letters().decode(expected[0].token_ids[:4], True)
    assert running.generation.stats.tokens_seen == 5 + 3
    assert waiting.generation.token_ids == []
    assert (waiting.generation.stats.tokens_seen, waiting.generation.stats.bytes_used) == (0, 0)
    assert running.generation.finish_reason == waiting.generation.finish_reason == "abort"
    assert run(engine, other).token_ids == expected[1].token_ids
    engine.abort(other)
    assert other.generation.finish_reason == "length"
    assert engine.blocks_in_use == 0


def test_streams_interleave_and_lose_nothing(make_compressed, make_prompts):
    engine, prompts = Engine(make_compressed(), tokenizer=Letters()), make_prompts(5, 20)
    expected = engine.generate(prompts, GREEDY)
    streams = [engine.stream(prompt, GREEDY) for prompt in prompts]
    seen = list(zip(*streams, strict=True))
    for index, generation in enumerate(expected):
        assert [events[index].token_id for events in seen] == generation.token_ids
        assert "".join(events[index].text for events in seen) == generation.text
        assert seen[-1][index].finish_reason == "length"
    assert engine.blocks_in_use == 0


def test_a_stream_that_is_closed_is_aborted(make_compressed, make_prompts):
    engine = Engine(make_compressed())
    never_begun = engine.stream(make_prompts(5)[0], GREEDY)
    stream = engine.stream(make_prompts(5)[0], GREEDY)
    first, _ = itertools.islice(stream, 2)
    assert engine.blocks_in_use > 0
    stream.close()
    never_begun.close()
    assert engine.blocks_in_use == 0
    assert len(first.request.generation.token_ids) == 2
    assert first.request.generation.finish_reason == "abort"
    assert engine.step() == []


def test_bad_requests_are_refused_when_they_are_made(make_compressed):
    engine = Engine(make_compressed(gates={"target_ratio": 1.0}), memory=4 * 2 * BLOCK_BYTES)
    with pytest.raises(ValueError, match="a sequence of 40 tokens may need 12 blocks at CR 1, and"):
        engine.stream([1] * 29, GREEDY)
    with pytest.raises(ValueError, match=r"stop=\('a',\) was given, but the engine has no tokenizer"):
        engine.submit([1], SamplingParams(stop=("a",)))
    assert engine.step() == []


def test_stop_strings_cut_the_text(make_compressed, make_prompts):
    model, (prompt,) = make_compressed(), make_prompts(9)
    engine = Engine(model, tokenizer=Letters())
    (free,) = engine.generate([prompt], GREEDY)
    stop = free.text[5:8]
    end = free.text.find(stop)
    count = next(n for n in range(12) if stop in Letters().decode(free.token_ids[:n], True))
    params = SamplingParams(max_new_tokens=12, temperature=0, stop=("never", stop))
    (generation,) = engine.generate([prompt], params)
    events = list(engine.stream(prompt, params))
    assert generation.text == "".join(event.text for event in events) == free.text[:end]
    assert generation.token_ids == [event.token_id for event in events] == free.token_ids[:count]
    assert generation.finish_reason == events[-1].finish_reason == "stop"
    assert generation.stats.tokens_seen == 9 + count - 1


def test_unseeded_requests_follow_torchs_default_generator(make_compressed, make_prompts):
    engine, prompts = Engine(make_compressed()), make_prompts(5, 9)

    def draw(seed):
        torch.manual_seed(seed)
        return [generation.token_ids for generation in engine.generate(prompts, SamplingParams(max_new_tokens=8))]

    assert draw(0) == draw(0) != draw(1)


@pytest.mark.parametrize("gates", METHODS, ids=str)
def test_turns_of_a_session_equal_the_whole_conversation(gates, make_stock, make_compressed, make_prompts):
    model = build(gates, make_stock, make_compressed)
    engine, history = Engine(model, prefill_chunk_size=7), []
    params = [GREEDY, SamplingParams(max_new_tokens=15, seed=3), GREEDY]
    with engine.session() as session:
        for prompt, sampling in zip(make_prompts(20, 1, 33), params, strict=True):
            history += prompt
            (expected,) = Engine(model).generate([history], sampling)
            generation = session.generate(prompt, sampling)
            assert generation.token_ids == expected.token_ids
            assert generation.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
            assert torch.equal(generation.stats.slots, expected.stats.slots)
            assert (
                generation.stats.tokens_seen == expected.stats.tokens_seen == len(history) + sampling.max_new_tokens - 1
            )
            history += generation.token_ids
            assert session.tokens == history
            assert engine.blocks_in_use > 0
    assert engine.blocks_in_use == 0


def test_a_further_turn_feeds_the_prompt_and_one_token(make_compressed, make_prompts, monkeypatch):
    engine, fed = Engine(make_compressed()), []
    forward = engine._runner.forward
    monkeypatch.setattr(engine._runner, "forward", lambda chunks: fed.append(len(chunks[0].tokens)) or forward(chunks))
    session = engine.session()
    for prompt in make_prompts(20, 6):
        session.generate(prompt, SamplingParams(max_new_tokens=3, temperature=0))
    assert fed == [20, 1, 1, 7, 1, 1]


@pytest.mark.parametrize("evicted", [False, True])
@pytest.mark.parametrize("gates", METHODS, ids=str)
def test_contexts_that_are_fed_equal_one_prompt_of_all(gates, evicted, make_stock, make_compressed, make_prompts):
    model = build(gates, make_stock, make_compressed)
    engine, rows = Engine(model, prefill_chunk_size=7, max_batch_size=1), []
    contexts, fed = make_prompts(20, 1, 33), []
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(output.shape[1]))
    session = engine.session()
    for context in contexts[:2]:
        fed += context
        stats = session.feed(context)
        assert stats.tokens_seen == len(fed)
        assert session.tokens == fed
    assert sum(rows) == 0
    if evicted:
        engine.generate(contexts[:1], GREEDY)
    rows.clear()
    generation = session.generate(contexts[2], GREEDY)
    assert sum(rows) == 12
    fed += contexts[2]
    (expected,) = Engine(model).generate([fed], GREEDY)
    assert generation.token_ids == expected.token_ids
    assert generation.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert torch.equal(generation.stats.slots, expected.stats.slots)
    assert generation.stats.tokens_seen == expected.stats.tokens_seen
    assert generation.stats.num_preemptions == evicted

    stats = session.feed(contexts[0])  # after an answer, whose last token comes with it
    (expected,) = Engine(model).generate([session.tokens], SamplingParams(max_new_tokens=1))
    assert stats.tokens_seen == len(session.tokens) == 54 + 12 + 20
    assert torch.equal(stats.slots, expected.stats.slots)
    assert stats.num_preemptions == 0
    session.close()
    assert engine.blocks_in_use == 0


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize(
    "policy",
    [policies.SnapKV(budget=Budget(ratio=2), window=4), policies.H2O(budget=Budget(ratio=2))],
    ids=lambda policy: type(policy).__name__,
)
def test_a_policy_takes_the_end_of_what_is_fed_for_a_prompts_end(policy, chunk, make_stock, make_prompts):
    engine, (context, question) = Engine(make_stock(), policy=policy, prefill_chunk_size=chunk), make_prompts(40, 5)
    session, other = engine.session(), engine.session()
    stats = session.feed(context)
    expected = other.generate(context, SamplingParams(max_new_tokens=1, temperature=0))
    assert torch.equal(stats.slots, expected.stats.slots)
    assert stats.achieved_ratio == expected.stats.achieved_ratio == 2
    for mine, theirs in zip(session.positions_held(), other.positions_held(), strict=True):
        assert all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True))
    # the other's token is fed with the next prompt: the same text in the same pieces
    question[0] = expected.token_ids[0]
    answer, expected = session.generate(question, GREEDY), other.generate(question[1:], GREEDY)
    assert answer.token_ids == expected.token_ids
    assert torch.equal(answer.stats.slots, expected.stats.slots)


def test_a_context_that_was_cut_short_is_a_part_of_the_next(make_compressed, make_prompts):
    model, prompts = make_compressed(gates={"target_ratio": 1.0}), make_prompts(20, 9, 5)
    engine = Engine(model, memory=4 * 4 * BLOCK_BYTES)
    session = engine.session()
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        session.feed(prompts[0])
    hook.remove()
    assert engine.blocks_in_use == 0
    assert session.tokens == prompts[0]
    assert session.feed(prompts[1]).tokens_seen == 29
    assert session.sequence.prompts == [(0, 29)]
    with pytest.raises(ValueError, match="a prompt or continuation is empty"):
        session.feed([])
    with pytest.raises(ValueError, match="a sequence of 69 tokens may need 20 blocks"):
        session.feed([1] * 40)
    stream = session.stream(prompts[2], GREEDY)
    next(stream)
    with pytest.raises(ValueError, match="last turn has not finished"):
        session.feed([1])
    stream.close()
    session.close()
    with pytest.raises(ValueError, match="the session is closed"):
        session.feed([1])
    assert engine.blocks_in_use == 0


def test_text_that_is_fed_begins_a_conversation(make_compressed):
    session = Engine(make_compressed(), tokenizer=Letters()).session()
    session.feed("HI")
    session.feed("BYE")
    assert session.tokens == Letters()("HIBYE", True)["input_ids"]


def test_a_session_survives_an_exception_and_an_abort(make_compressed, make_prompts):
    model, prompts = make_compressed(), make_prompts(20, 9, 5)
    engine = Engine(model)
    session = engine.session()
    first = session.generate(prompts[0], GREEDY)
    hook = model.lm_head.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        session.generate(prompts[1], GREEDY)
    hook.remove()
    assert engine.blocks_in_use == 0
    assert session.tokens == prompts[0] + first.token_ids + prompts[1]
    stream = session.stream(prompts[2], GREEDY)
    begun = [next(stream).token_id, next(stream).token_id]
    with pytest.raises(ValueError, match="last turn has not finished"):
        session.generate(prompts[2], GREEDY)
    stream.close()
    history = prompts[0] + first.token_ids + prompts[1] + prompts[2] + begun
    assert session.tokens == history
    (expected,) = Engine(model).generate([history + prompts[0]], GREEDY)
    assert session.generate(prompts[0], GREEDY).token_ids == expected.token_ids
    session.close()
    session.close()
    assert engine.blocks_in_use == 0
    with pytest.raises(ValueError, match="the session is closed"):
        session.generate(prompts[0], GREEDY)


def test_a_running_turn_ends_with_its_session(make_compressed, make_prompts):
    engine = Engine(make_compressed())
    with engine.session() as session:
        stream = session.stream(make_prompts(5)[0], GREEDY)
        next(stream)
    assert engine.blocks_in_use == 0
    assert list(stream) == []


BROKEN = 7
"""A token whose embedding is no number, so that nothing after it is."""


def with_broken_token(model):
    with torch.no_grad():
        model.get_input_embeddings().weight[BROKEN] = math.nan
        model.lm_head.weight[BROKEN] = 0  # so it is hardly ever the most likely one
    return model


@pytest.mark.parametrize(
    "method", [*METHODS, policies.SnapKV(budget=HALF, window=4), policies.D2O(budget=HALF)], ids=str
)
def test_logits_that_are_no_numbers_end_their_request_alone(method, make_stock, make_compressed, make_prompts):
    policy = method if isinstance(method, policies.CachePolicy) else None
    model = with_broken_token(build(None if policy else method, make_stock, make_compressed))
    prompts = [[token for token in prompt if token != BROKEN] for prompt in make_prompts(20, 9, 30)]
    engine = Engine(model, policy=policy, max_batch_size=3)  # rows and blocks are used again
    expected = engine.generate(prompts, GREEDY)
    assert all(BROKEN not in generation.token_ids for generation in expected)
    broken = [*prompts[1], BROKEN, 3]
    with pytest.raises(ArithmeticError, match=r"request 1 of 3 \(from 0\): the model's logits are not finite after a"):
        engine.generate([prompts[0], broken, prompts[2]], GREEDY)
    assert engine.blocks_in_use == 0
    requests = [engine.submit(prompt, GREEDY) for prompt in [prompts[0], broken, prompts[2], broken, prompts[1]]]
    events = []
    while any(request.generation is None for request in requests):
        events += engine.step()
    assert engine.blocks_in_use == 0
    for request, theirs in zip(requests[::2], (expected[0], expected[2], expected[1]), strict=True):
        assert request.error is None
        assert request.generation.token_ids == theirs.token_ids
        assert request.generation.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    for request in requests[1::2]:
        assert (request.generation.finish_reason, request.generation.token_ids) == ("error", [])
        assert f"a prompt of {len(broken)} tokens [{', '.join(map(str, broken[:8]))}, ...]" in str(request.error)
        assert not [event for event in events if event.request is request]
    # what is written where a broken request lay is as if it never had been there
    for generation, theirs in zip(engine.generate(prompts, GREEDY), expected, strict=True):
        assert generation.token_ids == theirs.token_ids
        assert generation.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


@pytest.mark.parametrize(("value", "temperature"), [(math.nan, 0), (math.inf, 1), (-math.inf, 1)])
def test_no_token_is_drawn_from_what_are_no_numbers(value, temperature, make_stock, make_prompts):
    model, (prompt,) = make_stock(), make_prompts(9)
    engine, params = Engine(model), SamplingParams(max_new_tokens=8, temperature=temperature, top_p=0.9, seed=1)
    (free,) = engine.generate([prompt], params)
    hook = model.lm_head.register_forward_hook(lambda module, args, output: output.fill_(value))
    with pytest.raises(ArithmeticError, match=r"request 0 of 1 .*a prompt of 9 tokens \[.*\] and 0 generated ones"):
        engine.generate([prompt], params)
    session = engine.session()
    with pytest.raises(ArithmeticError, match="logits are not finite"):
        session.generate(prompt, params)
    hook.remove()

    def later(module, args, output):
        rows.append(1)
        if len(rows) > 3:
            output[..., 1:] = -math.inf  # one token is left: it is drawn
            output[..., 0] = 0 if len(rows) < 6 else value

    rows = []
    hook = model.lm_head.register_forward_hook(later)
    stream, tokens = engine.stream(prompt, params), []
    with pytest.raises(ArithmeticError, match="and 5 generated ones"):
        tokens.extend(event.token_id for event in stream)
    hook.remove()
    assert tokens == [*free.token_ids[:3], 0, 0]
    assert engine.generate([prompt], params)[0].token_ids == free.token_ids
    session.close()
    assert engine.blocks_in_use == 0


def test_special_tokens_begin_a_conversation_once(make_compressed):
    engine = Engine(make_compressed(), tokenizer=Letters())
    session = engine.session()
    answer = session.generate("HI", GREEDY)
    session.generate("BYE", GREEDY)
    ids = Letters()("BYE", False)["input_ids"]
    assert session.tokens[:3] == Letters()("HI", True)["input_ids"]
    assert session.tokens[3 + 12 :][:3] == ids
    assert len(answer.text or "") <= 12
    (score,) = engine.score(["HI"], ["BYE"])
    torch.testing.assert_close(score, engine.score([session.tokens[:3]], [ids])[0])


def test_what_a_turn_may_need_counts_the_turns_before(make_compressed, make_prompts):
    engine = Engine(make_compressed(gates={"target_ratio": 1.0}), memory=4 * 3 * BLOCK_BYTES)
    session, prompts = engine.session(), make_prompts(20, 6, 5)
    session.generate(prompts[0], GREEDY)
    before = session.tokens
    with pytest.raises(ValueError, match="a sequence of 49 tokens may need 16 blocks"):
        session.generate(prompts[1], GREEDY)
    assert session.tokens == before
    session.generate(prompts[2], GREEDY)


def test_a_bar_shows_requests_and_tokens(make_compressed, make_prompts, capsys):
    engine, prompts = Engine(make_compressed(), max_batch_size=2), make_prompts(5, 9, 3)
    generations = engine.generate(prompts, GREEDY, progress=True)
    shown = capsys.readouterr().err.splitlines()[-1]
    assert "3/3" in shown and f"tokens={sum(len(generation.token_ids) for generation in generations)}" in shown
    engine.generate(prompts, GREEDY)
    assert capsys.readouterr().err == ""
