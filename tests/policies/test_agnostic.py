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


def test_a_later_turn_of_kvzip_repeats_what_is_new_and_earlier_entries_keep_their_scores(make_stock, make_prompts):
    first, second = make_prompts(40, 21)
    engine = Engine(make_stock(), policy=KVzip(budget=Budget(ratio=2), chunk=16, lead=3, instruction=[7, 8]))
    attention, repeated = engine._runner._attention, []
    finish = attention.finish
    attention.finish = lambda feed: finish(lambda ids, *others: (repeated.append(ids), feed(ids, *others)))

    def scores():
        layers = (engine.cache.layer(index) for index in range(2))
        read = (
            attention.backend.read_metadata(layer, torch.tensor([row]), ["position", "score"], 64) for layer in layers
        )
        return [dict(zip(*(part[0, head].tolist() for part in both), strict=True)) for both in read for head in (0, 1)]

    with engine.session() as session:
        session.feed(first)
        row = session.sequence.row
        assert repeated == [[7, 8, *first[:16]], [7, 8, *first[13:32]], [7, 8, *first[29:]]]
        before = scores()
        repeated.clear()
        session.feed(second)
        assert repeated == [[7, 8, *first[37:], *second[:16]], [7, 8, *second[13:]]]
        for old, new in zip(before, scores(), strict=True):
            stayed = [position for position in new if 0 <= position < 40]
            assert stayed and all(new[position] == old[position] for position in stayed)
            assert all(score > 0 for position, score in new.items() if position >= 4)
        assert int(engine.cache.lengths[:, row].sum()) == 30 * 4


def test_an_instruction_is_told_in_the_tokenizers_words(make_stock):
    def tokenizer(text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [len(text), 7]}

    tokenizer.decode = str
    policy = KVzip(budget=Budget(ratio=2), instruction="again!")
    assert Engine(make_stock(), tokenizer, policy=policy).policy.instruction == (6, 7)
    assert Engine(make_stock(), policy=policy).policy.instruction == ()


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


@pytest.mark.parametrize(
    "name", ["AdaKV", "AttentionMatching", "ExpectedAttention", "KVzip", "LAVa", "PyramidKV", "SnapKV"]
)
@pytest.mark.filterwarnings("ignore:window=", "ignore:sinks=")
def test_memory_is_counted_when_the_prompt_has_been_compressed(name, make_stock, make_prompts):
    engine = Engine(make_stock(), policy=getattr(policies, name)(budget=Budget(ratio=8)))
    (generation,) = engine.generate(make_prompts(120), SamplingParams(max_new_tokens=1, temperature=0))
    stats = generation.stats
    torch.testing.assert_close(stats.mean_slots, stats.slots.double())
    assert stats.mean_bytes_allocated == stats.peak_bytes_allocated == stats.bytes_allocated
