"""A pass that fails costs the request that makes it fail, and nobody else anything but time."""

from __future__ import annotations

import pytest
import torch

from dmc import Engine, SamplingParams, policies
from dmc.budget import Budget
from dmc.runtime import next_tokens
from dmc.runtime.paged_cache import PagedCache

GREEDY = SamplingParams(max_new_tokens=12, temperature=0)
POISON = 7
"""A token that the model below cannot read."""
METHODS = [None, {}, {"action": "drop", "delay": 4}, policies.H2O(budget=Budget(ratio=2))]


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


@pytest.mark.parametrize(
    "options", [{}, {"prefill_chunk_size": 8}, {"max_batch_size": 2}, {"prefix_cache": True}], ids=str
)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_only_the_request_that_makes_a_pass_fail_fails(method, options, make_stock, make_compressed, make_prompts):
    engine = build(method, make_stock, make_compressed, **options)
    prompts = clean(make_prompts(20, 90, 9, 30))
    expected = [engine.generate([prompt], GREEDY)[0] for prompt in prompts]
    broken = [*prompts[1], POISON, 3]
    asked = [prompts[0], broken, prompts[1], broken, prompts[2], prompts[3]]
    requests = []
    for prompt in asked:  # some are on their way when the first of them fails
        requests.append(engine.submit(prompt, GREEDY))
        events = engine.step()
        assert all(event.request in requests for event in events)
    finish(engine, requests)
    assert engine.blocks_in_use == 0
    good = [request for request, prompt in zip(requests, asked, strict=True) if prompt is not broken]
    for request, theirs in zip(good, expected, strict=True):
        assert request.error is None
        assert request.generation.token_ids == theirs.token_ids
        assert request.generation.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert torch.equal(request.generation.stats.slots, theirs.stats.slots)
        torch.testing.assert_close(request.generation.stats.mean_slots, theirs.stats.mean_slots)
    for request in (requests[1], requests[3]):
        assert request.generation.finish_reason == "error"
        assert "the kernel cannot read this" in str(request.error)
    with pytest.raises(RuntimeError, match=r"request 1 of 3 \(from 0\): the kernel cannot read this"):
        engine.generate([prompts[0], broken, prompts[1]], GREEDY)


def test_sessions_forks_and_scores_outlive_anothers_fault(make_compressed, make_prompts):
    engine = build({}, None, make_compressed)
    prompts = clean(make_prompts(20, 40, 9))
    sampled = SamplingParams(max_new_tokens=9, n=3, seed=5)
    expected = [engine.generate([prompts[0]], sampled)[0], engine.generate([prompts[1] + prompts[2]], GREEDY)[0]]
    (score,) = engine.score([prompts[0]], [prompts[2]])
    with engine.session() as session:
        session.feed(prompts[1])
        requests = [engine.submit(prompts[0], sampled), engine.submit(prompts[2], GREEDY, session)]
        engine.step()
        requests.append(engine.submit([3, POISON], GREEDY))
        finish(engine, requests)
        ours = [requests[0].generation, *requests[0].generation.alternatives]
        theirs = [expected[0], *expected[0].alternatives]
        assert [each.token_ids for each in ours] == [each.token_ids for each in theirs]
        assert requests[1].generation.token_ids == expected[1].token_ids
        assert str(requests[2].error) == "the kernel cannot read this"
        poisoned = engine.submit([3, POISON], GREEDY)
        torch.testing.assert_close(engine.score([prompts[0]], [prompts[2]])[0], score, atol=1e-4, rtol=0)
        assert poisoned.error is not None
        with pytest.raises(RuntimeError, match="cannot read"):
            engine.score([prompts[0]], [[POISON, 3]])
    assert engine.blocks_in_use == 0


def test_a_small_memory_and_a_fault_end_all_requests(make_compressed, make_prompts):
    engine = build({"target_ratio": 1.0}, None, make_compressed, memory=4 * 6 * 16 * 2 * 16 * 4)
    prompts = clean(make_prompts(30, 40, 30, 40))
    expected = [engine.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    requests = [engine.submit(prompt, GREEDY) for prompt in prompts]
    for _ in range(5):
        engine.step()
    hook = engine.model.lm_head.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("once")))
    engine.step()
    hook.remove()
    requests.append(engine.submit([POISON] * 9, GREEDY))
    finish(engine, requests)
    assert [request.generation.token_ids for request in requests[:4]] == expected
    assert str(requests[4].error) == "the kernel cannot read this"


@pytest.mark.parametrize("options", [{}, {"max_batch_size": 2}, {"prefix_cache": True}], ids=str)
def test_sampling_that_fails_once_after_a_fork_costs_nothing_but_time(
    options, make_compressed, make_prompts, monkeypatch
):
    model, prompts, sampled = make_compressed(), make_prompts(20, 40), SamplingParams(max_new_tokens=9, n=3, seed=5)
    expected = Engine(model).generate(prompts, sampled)
    engine, choose, failures = Engine(model, **options), next_tokens.choose_tokens, [ValueError("once")]

    def stumble(logits, *arguments):
        if failures and len(logits) > 1:
            raise failures.pop()
        return choose(logits, *arguments)

    monkeypatch.setattr(next_tokens, "choose_tokens", stumble)
    requests = [engine.submit(prompt, sampled) for prompt in prompts]
    finish(engine, requests)
    assert not failures and engine.blocks_in_use == 0
    for request, theirs in zip(requests, expected, strict=True):
        assert request.error is None
        ours = [request.generation, *request.generation.alternatives]
        assert [each.token_ids for each in ours] == [each.token_ids for each in (theirs, *theirs.alternatives)]


def drain(engine):
    events = []
    for _ in range(400):
        if not engine.num_running + engine.num_waiting:
            return events
        events += engine.step()
    raise AssertionError("the engine does not come to an end")


def test_sampling_that_fails_for_a_prompt_alone_forks_it_no_further(make_compressed, make_prompts, monkeypatch):
    engine, choose, failures = Engine(make_compressed()), next_tokens.choose_tokens, [ValueError("once")]

    def stumble(logits, *arguments):
        if failures:
            raise failures.pop()
        return choose(logits, *arguments)

    monkeypatch.setattr(next_tokens, "choose_tokens", stumble)
    request = engine.submit(*make_prompts(20), SamplingParams(max_new_tokens=4, n=3, seed=5))
    events = drain(engine)
    assert len(request.branches) == 3 and not any(each.alternatives for each in request.alternatives)
    assert {id(event.request) for event in events} <= {id(each) for each in request.branches}
    assert engine.blocks_in_use == 0 and not failures


@pytest.mark.parametrize("params", [{"n": 3, "seed": 5}, {"beam_width": 3, "temperature": 0.0}], ids=str)
@pytest.mark.parametrize("nth", [1, 2])
def test_a_fork_that_fails_leaves_nothing_behind(params, nth, make_compressed, make_prompts, monkeypatch):
    model, (long, short) = make_compressed(), make_prompts(40, 20)
    plain = SamplingParams(max_new_tokens=9, temperature=0.0)
    (expected,) = Engine(model).generate([short], plain)
    engine, taken, snapshot = Engine(model), [], PagedCache.snapshot

    def fail(self, row):
        taken.append(row)
        if len(taken) == nth:
            raise MemoryError("no room for a snapshot")
        return snapshot(self, row)

    monkeypatch.setattr(PagedCache, "snapshot", fail)
    forking, other = engine.submit(long, SamplingParams(max_new_tokens=9, **params)), engine.submit(short, plain)
    drain(engine)
    assert other.error is None and other.generation.token_ids == expected.token_ids
    assert len(taken) >= nth and engine.blocks_in_use == 0
    assert (forking.error is None) == ("n" in params)  # a pass is run again, a search is not


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
    (tokenizer.bad,) = [each for each in expected[0] if each not in expected[1]][:1]
    requests = [engine.submit(prompt, GREEDY) for prompt in prompts]
    while requests[1].generation is None:
        engine.step()
    assert requests[1].generation.token_ids == expected[1]
    assert isinstance(requests[0].error, KeyError)
    assert engine.blocks_in_use == 0


@pytest.mark.parametrize("memory", [None, 4 * 9 * 16 * 2 * 16 * 4])
@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize("gates", [None, {}, {"action": "drop", "delay": 4}], ids=str)
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
