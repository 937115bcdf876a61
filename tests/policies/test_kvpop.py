"""KVpop beside its oracle, its scorer in pieces, and what is refused."""

import pytest
import torch
from evicting import BUDGETS, write_scorer

from dmc import Engine, SamplingParams
from dmc.budget import Budget
from dmc.policies import KVpop
from dmc.policies.delayed_scorer import DelayedScorer, ScorerConfig

ANSWER = SamplingParams(max_new_tokens=6, temperature=0)


@pytest.mark.parametrize(
    ("budget", "options", "protect", "group"),
    [
        (BUDGETS[0], {}, 0.0, 2),
        (BUDGETS[1], {"window": 1, "state_size": 1}, 0.0, 4),
        (BUDGETS[0], {"window": 30}, 0.0, 1),
        (BUDGETS[1], {}, 0.2, 2),
    ],
)
def test_agrees_with_the_oracle(assert_like_oracle, budget, options, protect, group, tmp_path):
    scorer = write_scorer(tmp_path / "scorer", num_layers=3, kv_heads=4 // group, **options)
    assert_like_oracle("KVpop", budget, group, scorer=scorer, **({"protect": protect} if protect else {}))


def test_what_is_read_in_pieces_is_what_is_read_at_once(tmp_path):
    scorer = DelayedScorer.load(write_scorer(tmp_path / "scorer", window=3))
    states = torch.randn(2, 2, 300, 32, generator=torch.Generator().manual_seed(1))
    leaving = states.roll(3, dims=2)
    begin = torch.zeros(2, 2, scorer.state_numbers)
    at_once, end = scorer.read(1, begin, states, leaving)
    state, scores = begin, []
    for first, last in ((0, 1), (1, 140), (140, 300)):
        of_piece, state = scorer.read(1, state, states[:, :, first:last], leaving[:, :, first:last])
        scores.append(of_piece)
    torch.testing.assert_close(torch.cat(scores, 2), at_once)
    torch.testing.assert_close(state[..., :-1], end[..., :-1])


def test_large_gates_do_not_overflow(tmp_path):
    scorer = DelayedScorer.load(write_scorer(tmp_path / "scorer"))
    scorer.project_bias.data[..., -2] = 200.0
    states = torch.randn(1, 2, 50, 32)
    scores, state = scorer.read(0, torch.zeros(1, 2, scorer.state_numbers), states, states)
    assert scores.isfinite().all() and state.isfinite().all()


@pytest.mark.parametrize("budget", [{"ratio": 4}, {"tokens": 90}])
def test_a_later_turn_goes_on_from_the_state_of_the_one_before(make_stock, make_prompts, budget, tmp_path):
    model, scorer = make_stock(), write_scorer(tmp_path / "scorer")
    policy = KVpop(budget=Budget(**budget), scorer=scorer)
    engines = [Engine(model, policy=policy, **options) for options in ({}, {"prefill_chunk_size": 7})]
    prompts, held = make_prompts(60, 25, 40), []
    for engine in engines:
        with engine.session() as session:
            answers = [session.generate(prompt, ANSWER).token_ids for prompt in prompts]
            held.append((answers, [[head.tolist() for head in layer] for layer in session.positions_held()]))
            length = session.positions_held()[0][0]
            assert {*range(int(length[-1]) - 3, int(length[-1]) + 1)} <= {*length.tolist()}
    assert held[0] == held[1]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_layers": 3}, "is of 3 layers, the model has 2"),
        ({"kv_heads": 4}, "is of 4 KV heads of 16 channels, the model has 2 of 16"),
    ],
)
def test_a_scorer_of_another_model_is_refused(make_stock, options, error, tmp_path):
    scorer = write_scorer(tmp_path / "scorer", **options)
    with pytest.raises(ValueError, match=error):
        Engine(make_stock(), policy=KVpop(budget=Budget(ratio=2), scorer=scorer))


def test_what_is_no_scorer_is_refused(make_stock, make_compressed, tmp_path):
    (tmp_path / "damaged").write_bytes(b"no weights")
    for scorer, error in ((None, "needs scorer=FILE"), ("absent", "is no scorer"), (tmp_path / "damaged", "is no")):
        with pytest.raises(ValueError, match=error):
            Engine(make_stock(), policy=KVpop(budget=Budget(ratio=2), scorer=None if scorer is None else str(scorer)))
    policy = KVpop(budget=Budget(ratio=2), scorer=write_scorer(tmp_path / "scorer"))
    with pytest.raises(ValueError, match="decide token by token"):
        Engine(make_compressed(), policy=policy)
    with pytest.raises(ValueError, match="window"):
        ScorerConfig(window=0)
