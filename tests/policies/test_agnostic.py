"""Expected Attention and KVzip against their oracles, and the controls by what they keep."""

import pytest
import torch

from dmc import Engine, SamplingParams, policies
from dmc.budget import Budget
from dmc.policies import KVzip, Marked, Random


def test_kvzip_shares_one_budget_among_all_layers_and_heads(make_stock, make_prompts, scored):
    (trace,) = scored(make_stock(num_layers=3), KVzip(budget=Budget(ratio=4)), make_prompts(80), [[1]])
    assert trace.slots.sum() == 20 * 6 and trace.slots.sum(-1).unique().numel() > 1
    assert all(positions[:4] == [0, 1, 2, 3] for heads in trace.positions for positions in heads)


def test_an_instruction_is_told_in_the_tokenizers_words(make_stock):
    def tokenizer(text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [len(text), 7]}

    tokenizer.decode = str
    told = KVzip(budget=Budget(ratio=2), instruction="again!")
    assert Engine(make_stock(), tokenizer, policy=told).policy.instruction == (6, 7)
    assert Engine(make_stock(), policy=told).policy.instruction == ()


def test_a_marked_token_stays_with_the_last_ones(make_stock, make_prompts, scored):
    (prompt,) = make_prompts(40)
    prompt[5], prompt[17], prompt[39] = 80, 81, 80
    for position in (4, 6, 16, 18):
        prompt[position] = 1
    policy = Marked(budget=Budget(tokens=7), markers=[80, 81], behind=[0, 2])
    (trace,) = scored(make_stock(), policy, [prompt], [[1, 2]])
    behind = [p for p, token in enumerate(prompt) if token in (80, 81) or (p > 1 and prompt[p - 2] in (80, 81))]
    expected = sorted([*behind[-7:], *[p for p in range(39, -1, -1) if p not in behind][: max(0, 7 - len(behind))]])
    assert trace.positions == [[[*expected, 40]] * 2] * 2
    (last,) = scored(make_stock(), Marked(budget=Budget(tokens=7)), [prompt], [[1, 2]])
    assert last.positions == [[list(range(33, 41))] * 2] * 2


def test_lots_are_drawn_for_each_head_and_differ_with_the_seed(make_stock, make_prompts, scored):
    kept = [
        scored(make_stock(), Random(budget=Budget(ratio=4), seed=seed), make_prompts(400), [[1]])[0]
        for seed in (0, 0, 1)
    ]
    assert kept[0].positions == kept[1].positions != kept[2].positions
    assert kept[0].positions[0][0] != kept[0].positions[0][1] != kept[0].positions[1][1]
    everywhere = torch.tensor(kept[0].positions).double()
    assert (kept[0].slots == 100).all() and 180 < everywhere.mean() < 220


@pytest.mark.parametrize("name", ["AdaKV", "ExpectedAttention", "KVzip", "LAVa", "PyramidKV", "SnapKV"])
@pytest.mark.filterwarnings("ignore:window=", "ignore:sinks=")
def test_memory_is_counted_when_the_prompt_has_been_compressed(name, make_stock, make_prompts):
    engine = Engine(make_stock(), policy=getattr(policies, name)(budget=Budget(ratio=8)))
    (generation,) = engine.generate(make_prompts(120), SamplingParams(max_new_tokens=1, temperature=0))
    stats = generation.stats
    torch.testing.assert_close(stats.mean_slots, stats.slots.double())
    assert stats.mean_bytes_allocated == stats.peak_bytes_allocated == stats.bytes_allocated
