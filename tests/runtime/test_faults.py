"""A pass that fails ends the request whose fault it is; all others lose nothing but time."""

from __future__ import annotations

import pytest
import torch
from covering import cover

from dmc import Engine, SamplingParams, policies
from dmc.budget import Budget
from dmc.runtime import engine_core
from dmc.runtime.paged_cache import PagedCache

GREEDY = SamplingParams(max_new_tokens=12, temperature=0)
POISON = 7
"""A token that the model below cannot read."""
METHODS = [None, {}, {"action": "drop", "delay": 4}, policies.H2O(budget=Budget(ratio=2))]
OPTIONS = [{}, {"prefill_chunk_size": 8}, {"max_batch_size": 2}, {"prefix_cache": True}]
BOTH = [(method, OPTIONS[(index + shift) % 4]) for index, method in enumerate(METHODS) for shift in (0, 2)]
"""Each with two others."""


def build(method, make_stock, make_compressed, **options):
    policy = method if isinstance(method, policies.CachePolicy) else None
    model = make_stock() if method is None or policy else make_compressed(gates=method)
    never = torch.zeros(model.config.vocab_size).index_fill(0, torch.tensor(POISON), -1e4)
    model.lm_head.register_forward_hook(lambda module, states, logits: logits + never)

    def refuse(module, arguments):
        if (arguments[0] == POISON).any():
            raise RuntimeError("the kernel cannot read this")

    # after the first layer, so that a part of the pass has been written
    model.get_input_embeddings().register_forward_pre_hook(lambda module, tokens: seen.append(tokens[0]))
    seen = []
    model.model.layers[1].register_forward_pre_hook(lambda module, _: refuse(module, (seen[-1],)))
    return Engine(model, policy=policy, **options)


def clean(prompts):
    return [[token for token in prompt if token != POISON] for prompt in prompts]


def finish(engine, requests):
    events = []
    for _ in range(2000):
        if all(request.generation is not None for request in requests):
            return events
        events += engine.step()
    raise AssertionError("requests do not end")


@pytest.mark.parametrize(("method", "options"), BOTH, ids=str)
def test_a_pass_that_fails_costs_the_request_alone_that_makes_it_fail(
    method, options, make_stock, make_compressed, make_prompts
):
    engine = build(method, make_stock, make_compressed, **options)
    prompts = clean(make_prompts(20, 90, 9, 30))
    expected = [engine.generate([prompt], GREEDY)[0] for prompt in prompts]
    broken = [*prompts[1], POISON, 3]
    requests = [engine.submit(prompt, GREEDY) for prompt in (prompts[0], broken, *prompts[1:])]
    finish(engine, requests)
    assert engine.blocks_in_use == 0
    assert requests[1].generation.finish_reason == "error" and "cannot read this" in str(requests[1].error)
    for request, theirs in zip([requests[0], *requests[2:]], expected, strict=True):
        assert request.error is None
        assert request.generation.token_ids == theirs.token_ids
        assert request.generation.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert torch.equal(request.generation.stats.slots, theirs.stats.slots)
        torch.testing.assert_close(request.generation.stats.mean_slots, theirs.stats.mean_slots)
    with pytest.raises(RuntimeError, match=r"request 1 of 3 \(from 0\): the kernel cannot read this"):
        engine.generate([prompts[0], broken, prompts[1]], GREEDY)
    for prompt, theirs in zip(prompts, expected, strict=True):
        assert engine.generate([prompt], GREEDY)[0].token_ids == theirs.token_ids


@pytest.mark.parametrize("memory", [None, 2**17])
def test_a_fault_in_the_middle_of_an_answer_costs_no_others(memory, make_stock, make_prompts):
    engine = build(None, make_stock, None, memory=memory, max_batch_size=5)
    sampled = SamplingParams(max_new_tokens=12, seed=3, n=2)
    long, *prompts = clean(make_prompts(24, 9, 30, 12))
    plain = engine.generate(prompts, sampled)
    token_ids = [[one.token_ids for one in (best, *best.alternatives)] for best in plain]

    def poison(tokens, logits):
        return logits.index_fill(1, torch.tensor(POISON), 1e9 if tokens.shape[1] > 29 else -1e9)

    requests = [engine.submit(long, SamplingParams(max_new_tokens=12, temperature=0, logits_processor=poison))]
    requests += [engine.submit(prompt, sampled) for prompt in prompts]
    finish(engine, requests)
    assert requests[0].generation.finish_reason == "error"
    assert requests[0].generation.token_ids[-1] == POISON and len(requests[0].sequence.tokens) == 31
    for request, theirs in zip(requests[1:], token_ids, strict=True):
        best = request.generation
        assert request.error is None and [one.token_ids for one in (best, *best.alternatives)] == theirs
    assert engine.blocks_in_use == 0 and not engine._core._suspects


def test_a_fault_of_all_ends_all(make_stock, make_prompts):
    engine = Engine(make_stock())
    requests = [engine.submit(prompt, GREEDY) for prompt in make_prompts(9, 5, 20)]
    engine.step()
    hook = engine.model.model.norm.register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("lost")))
    finish(engine, requests)
    hook.remove()
    assert [str(request.error) for request in requests] == ["lost"] * 3 and engine.blocks_in_use == 0


def test_sessions_that_rest_outlive_a_fault(make_compressed, make_prompts):
    engine = build({}, None, make_compressed)
    prompts = clean(make_prompts(20, 40, 9))
    (expected,) = engine.generate([prompts[1] + prompts[2]], GREEDY)
    with engine.session() as session:
        session.feed(prompts[1])
        with pytest.raises(RuntimeError, match="cannot read"):
            engine.score([prompts[0]], [[POISON, 3]])
        failed = engine.submit([POISON, 3], GREEDY, session)
        finish(engine, [failed])
        assert failed.generation.finish_reason == "error"
    with engine.session() as session:
        session.feed(prompts[1])
        poisoned = engine.submit([3, POISON], GREEDY)
        finish(engine, [poisoned])
        assert session.generate(prompts[2], GREEDY).token_ids == expected.token_ids
    assert engine.blocks_in_use == 0


def drain(engine):
    events = []
    for _ in range(400):
        if not engine.num_running + engine.num_waiting:
            return events
        events += engine.step()
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("where", ["distributions", "snapshot"])
@pytest.mark.parametrize("nth", [1, 2])
def test_continuations_fail_together_and_leave_nothing_behind(where, nth, make_compressed, make_prompts, monkeypatch):
    model, (long, short) = make_compressed(), make_prompts(40, 20)
    sampled, greedy = SamplingParams(max_new_tokens=9, n=3, seed=5), SamplingParams(max_new_tokens=9, temperature=0.0)
    (expected,) = Engine(model).generate([short], greedy)
    engine, calls = Engine(model), []
    owner = engine_core if where == "distributions" else PagedCache
    called = getattr(owner, where)

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) == nth:
            raise MemoryError("no room")
        return called(*arguments)

    monkeypatch.setattr(owner, where, fail)
    forking = engine.submit(long, sampled)
    events = drain(engine)
    other = engine.submit(short, greedy)
    drain(engine)
    every = [forking.generation, *forking.generation.alternatives]
    assert str(forking.error) == "no room" and {generation.finish_reason for generation in every} == {"error"}
    assert len(events) == sum(len(generation.token_ids) for generation in every)
    assert other.error is None and other.generation.token_ids == expected.token_ids and engine.blocks_in_use == 0


class Stumbling:
    """A tokenizer that cannot write one token."""

    bad: int = -1

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(letter) - 33 for letter in text]}

    def decode(self, tokens, skip_special_tokens):
        if self.bad in tokens:
            raise KeyError(self.bad)
        return "".join(chr(token + 33) for token in tokens)


def test_a_tokenizer_that_fails_ends_its_request_alone(make_compressed, make_prompts):
    tokenizer = Stumbling()
    engine, prompts = Engine(make_compressed(), tokenizer), make_prompts(5, 20)
    expected = [generation.token_ids for generation in engine.generate(prompts, GREEDY)]
    (tokenizer.bad,) = [token for token in expected[0] if token not in expected[1]][:1]
    requests = [engine.submit(prompt, GREEDY) for prompt in prompts]
    while requests[1].generation is None:
        engine.step()
    assert requests[1].generation.token_ids == expected[1]
    assert isinstance(requests[0].error, KeyError)
    assert engine.blocks_in_use == 0


@pytest.mark.parametrize(
    ("gates", "chunk", "memory"),
    cover([None, {}, {"action": "drop", "delay": 4}], [None, 8], [None, 4 * 9 * 16 * 2 * 16 * 4]),
    ids=str,
)
def test_the_prompts_own_tokens_are_as_likely_as_scores_say(
    gates, chunk, memory, make_stock, make_compressed, make_prompts
):
    model = make_stock() if gates is None else make_compressed(gates=gates)
    engine = Engine(model, prefill_chunk_size=chunk, memory=memory, prefix_cache=True)
    prompts = make_prompts(70, 1, 90, 70)
    prompts[3] = prompts[0]  # the prefix cache must not keep its logits from it
    params = SamplingParams(max_new_tokens=6, temperature=0, prompt_logprobs=2, n=2)
    plain = engine.generate(prompts, GREEDY)
    for prompt, generation, theirs in zip(prompts, engine.generate(prompts, params), plain, strict=True):
        assert generation.token_ids == theirs.token_ids[:6]
        expected = Engine(model).score([prompt[:1]], [prompt[1:]])[0] if len(prompt) > 1 else torch.empty(0, 83)
        given = expected.gather(-1, torch.tensor(prompt[1:], dtype=torch.long)[:, None])[:, 0]
        assert generation.prompt_logprobs == pytest.approx(given.tolist(), abs=1e-4)
        for mine, row in zip(generation.prompt_top_logprobs, expected, strict=True):
            assert list(mine) == row.topk(2).indices.tolist()
            assert list(mine.values()) == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
    assert plain[0].prompt_logprobs == []


def test_a_policy_has_no_prompt_likelihoods_of_its_own(make_stock):
    engine = Engine(make_stock(), policy=policies.H2O(budget=Budget(ratio=2)))
    with pytest.raises(ValueError, match="prompt_logprobs=0: a policy compresses a prompt when it ends"):
        engine.submit([1, 2], SamplingParams(prompt_logprobs=0))
