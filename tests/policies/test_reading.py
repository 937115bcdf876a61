"""Policies that drop nothing and read a part: what is theirs alone, and worked numbers of Quest and InfLLM."""

import pytest
import torch
from runtime.test_laws import READING, layers_of

from dmc import Engine, SamplingParams
from dmc.budget import Budget
from dmc.policies import InfLLM, OmniKV, Quest
from dmc.policies.infllm import block_relevance
from dmc.policies.quest import upper_bounds
from dmc.policies.reading import top_positions

GREEDY = SamplingParams(max_new_tokens=12, temperature=0)


@pytest.mark.parametrize("method", READING)
def test_a_method_does_something_and_drops_nothing(method, make_stock, make_prompts):
    model, policy = make_stock(num_layers=layers_of(method)), READING[method]
    prompts = make_prompts(37, 20, 44)
    full, part = Engine(model).generate(prompts, GREEDY), Engine(model, policy=policy).generate(prompts, GREEDY)
    assert any(ours.token_ids != theirs.token_ids for ours, theirs in zip(part, full, strict=True))
    for generation in part:
        stats = generation.stats
        assert (stats.slots == stats.tokens_seen).all()
        assert stats.achieved_ratio == 1
        assert stats.bytes_used <= stats.bytes_allocated
        assert stats.bytes_fast <= stats.bytes_allocated


def test_entries_that_are_left_unread_are_counted(make_stock, make_prompts):
    """Of a prompt of 60 tokens 20 are to be read; 11 of 12 generated tokens, at positions 60 to 70, are fed."""
    prompts, budget, fed = make_prompts(60), Budget(tokens=20), range(60, 71)

    def count(policy, num_layers=4):
        engine = Engine(make_stock(num_layers=num_layers), policy=policy)
        engine.generate(prompts, GREEDY)
        return int(engine.cache.num_unread) / engine.cache.layout.num_kv_heads

    assert count(None) == 0
    pages = [16 + at % 4 + 1 for at in fed]  # four whole pages and the newest one
    quest = Quest(budget=budget, page_size=4, dense_layers=1)
    assert count(quest) == 3 * sum(at + 1 - read for at, read in zip(fed, pages, strict=True))
    for offload in (False, True):
        omnikv = OmniKV(budget=budget, filter_layers=(0,), offload=offload)
        assert count(omnikv) == 2 * len(fed) * 40  # layers 2 and 3 read 20 tokens of the prompt and all generated ones
    infllm = InfLLM(budget=budget, block_size=4, representatives=2, initial=4, local=8, chunk=8)
    unread = 0
    for begin in (*range(0, 60, 8), *fed):  # a chunk of the prompt, or a generated token
        complete = max(0, begin - 12) // 4
        for at in range(begin, min(begin + 8, 60) if begin < 60 else begin + 1):
            if at >= 20:
                unread += max(0, complete - 2) * 4  # all but two blocks
    assert count(infllm, 2) == 2 * unread


@pytest.mark.parametrize("method", READING)
def test_a_conversation_is_the_same_after_it_was_evicted(method, make_stock, make_prompts):
    model, policy = make_stock(num_layers=layers_of(method)), READING[method]
    turns, (other,) = make_prompts(30, 9, 17), make_prompts(10, seed=3)

    def converse(engine, disturb):
        with engine.session() as session:
            generations = []
            for turn in turns:
                generations.append(session.generate(turn, SamplingParams(max_new_tokens=4, temperature=0)))
                if disturb:
                    engine.generate([other], SamplingParams(max_new_tokens=2))
        assert engine.blocks_in_use == 0
        return generations

    expected = converse(Engine(model, policy=policy), disturb=False)
    evicted = converse(Engine(model, policy=policy, max_batch_size=1, prefill_chunk_size=16), disturb=True)
    for ours, theirs in zip(evicted, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert torch.equal(ours.stats.slots, theirs.stats.slots)
    assert any(generation.stats.num_preemptions for generation in evicted)


@pytest.mark.parametrize("method", READING)
def test_every_backend_reads_the_same(method, make_stock, make_prompts):
    model, policy = make_stock(num_layers=layers_of(method)), READING[method]
    prompts, continuations = make_prompts(45, 20), make_prompts(6, 9, seed=2)
    expected = torch.cat(Engine(model, policy=policy, kernels="reference").score(prompts, continuations))
    actual = torch.cat(Engine(model, policy=policy, kernels="cpu").score(prompts, continuations))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("levels", [3, 1000])
def test_highest_come_in_order_and_the_first_of_equals_wins(levels):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(levels, (4, 3, 20), generator=generator).float()
    counts = torch.randint(0, 9, (4, 3), generator=generator)
    found = top_positions(scores, counts, 8)
    assert found.shape == (4, 3, 8)
    for i in range(4):
        for j in range(3):
            ranked = sorted(range(20), key=lambda k: (-float(scores[i, j, k]), k))
            count = int(counts[i, j])
            assert found[i, j].tolist() == sorted(ranked[:count]) + [0] * (8 - count)


def test_all_are_found_where_there_are_no_more():
    scores = torch.tensor([[0.5, -torch.inf, -torch.inf], [0.1, 0.2, 0.3]])
    assert top_positions(scores, torch.tensor([1, 3]), 7).tolist() == [[0, 0, 0], [0, 1, 2]]


def test_worked_number():
    bound = upper_bounds(torch.tensor([[1.0, -2.0]]), torch.tensor([[-1.0, 0.0]]), torch.tensor([[3.0, 4.0]]))
    assert bound.tolist() == [3.0]


def test_no_key_of_a_page_scores_above_its_bound():
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(5, 40, 16, 8, generator=generator)  # [heads, pages, page, D]
    query = torch.randn(5, 3, 8, generator=generator)
    bounds = upper_bounds(query, keys.amin(2), keys.amax(2))
    scores = torch.einsum("hgd,hpnd->hpn", query, keys)
    assert (bounds[..., None] >= scores - 1e-5).all()
    of_one = keys[:, :, 0]
    torch.testing.assert_close(upper_bounds(query, of_one, of_one), scores[..., 0])


def test_two_keys_come_with_every_page(make_stock, make_prompts):
    model, (prompt,) = make_stock(), make_prompts(64)
    plain, quest = Engine(model), Engine(model, policy=Quest(budget=Budget(ratio=4), page_size=8))
    assert quest.cache.block_bytes == plain.cache.block_bytes * (1 + 2 / (2 * 8))
    few = SamplingParams(max_new_tokens=4, temperature=0)
    ((generation,), (reference,)) = (engine.generate([prompt], few) for engine in (quest, plain))
    assert (generation.stats.slots == reference.stats.slots).all()


def test_relevance_is_summed_over_query_heads():
    query = torch.tensor([[[[1.0, 0.0], [0.0, 2.0]], [[1.0, 1.0], [-1.0, 1.0]]]])  # [1, 2 heads, 2 of a group, 2]
    keys = torch.tensor([[[[1.0, 1.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 3.0]]]])
    assert block_relevance(query, keys).tolist() == [[3.0 + 0.0, 2.0 + 6.0]]


def test_the_papers_setting_is_a_budget():
    policy = InfLLM(budget=Budget(tokens=8320))
    assert policy.num_blocks(10**6) == 32
    assert (policy.num_complete(4224), policy.num_complete(4351), policy.num_complete(4352)) == (0, 0, 1)
    assert InfLLM(budget=Budget(tokens=10)).num_blocks(10**6) == 1
