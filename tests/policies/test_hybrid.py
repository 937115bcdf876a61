"""Policies in models some of whose layers have a window or no attention: they act on the others."""

import dataclasses

import pytest
import torch
from oracles.dense_hybrid import DenseHybrid, answers
from runtime.test_laws import POLICIES, READING
from runtime.test_recurrent import NONE, recurrent
from runtime.test_windows import FULL, SLIDING, hybrid, own_tokens, texts

from dmc import Engine, SamplingParams, policies
from dmc.budget import Budget
from dmc.policies.base import Entries
from dmc.policies.expected_attention import Moments

TOLERANCE = 1e-4
ALL = {**POLICIES, **READING}
RECURRENT = ["qwen3_next", "qwen3_5_text"]


def full_layers_of(method):
    """OmniKV and Quest want some more than two."""
    return 6 if method.startswith("OmniKV") else 3 if method == "Quest" else 2


def mixed(family, count):
    """As many layers with full attention, each behind one of another kind."""
    if family in RECURRENT:
        return recurrent(family, num_hidden_layers=2 * count, layer_types=[NONE, FULL] * count)
    return hybrid(family, 16, num_hidden_layers=2 * count, layer_types=[SLIDING, FULL] * count)


KEEPING = {"H2O": {}, "SnapKV": {"window": 8, "kernel_size": 5}}


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *((family, "H2O") for family in ("gpt_oss", "exaone4", "olmo3", "qwen3_next")),
        *((family, "SnapKV") for family in ("gpt_oss", "gemma3_text", "cohere2", "ministral", "qwen3_5_text")),
    ],
)
def test_full_layers_keep_what_a_dense_oracle_keeps(scored, family, method):
    options = KEEPING[method]
    model, (prompt, continuation) = (recurrent if family in RECURRENT else hybrid)(family), texts(150, 30)
    oracle = DenseHybrid(method, len(prompt), 32, **options)
    expected = answers(model, prompt + continuation[:-1], oracle)[len(prompt) - 1 :]
    policy = getattr(policies, method)(budget=Budget(tokens=32), **options)
    for chunk in (None, 50):
        (trace,) = scored(model, policy, [prompt], [continuation], prefill_chunk_size=chunk)
        torch.testing.assert_close(trace.log_probs, expected, atol=TOLERANCE, rtol=2e-5 if family in RECURRENT else 0)
        held = [positions for layer in trace.positions for positions in layer]
        assert held == [sorted(kept) for _, kept in sorted(oracle.kept.items())] and len(held) == 2 * 2


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *(("gpt_oss", "H2O"), ("qwen3_next", "LAVa"), ("qwen3_next", "KVzip"), ("gpt_oss", "InfLLM")),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                *(("qwen3_next", "Quest"), ("gpt_oss", "OmniKV, offload")),
                *(("gpt_oss", name) for name in ("KVzip", "AttentionMatching", "CaM", "ExpectedAttention")),
            )
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:window=", "ignore:sinks=")
def test_a_crowd_with_forks_is_served_as_each_request_alone_and_a_budget_for_all_is_the_model(family, method):
    """The latter is a law of `test_laws.py`, shown there for models whose layers are all alike."""
    count = full_layers_of(method)
    model, prompts, policy = mixed(family, count), texts(60, 33), ALL[method]
    alone = Engine(model, policy=policy, max_batch_size=1)
    greedy, several = (SamplingParams(max_new_tokens=6, temperature=0, n=n) for n in (1, 2))
    expected = [alone.generate([prompt], greedy)[0] for prompt in prompts]
    engine = Engine(model, policy=policy, max_batch_size=4)
    for generation, wanted in zip(engine.generate(prompts, several), expected, strict=True):
        for ours in (generation, *generation.alternatives):
            assert ours.token_ids == wanted.token_ids
            assert torch.equal(ours.stats.slots, wanted.stats.slots) and ours.stats.slots.shape == (count, 2)
    assert engine.blocks_in_use == 0
    spacious = dataclasses.replace(policy, budget=Budget(tokens=500))
    for prompt, generation in zip(prompts, Engine(model, policy=spacious).generate(prompts, greedy), strict=True):
        assert generation.token_ids == own_tokens(model, prompt, 6)


def test_a_model_whose_layers_all_have_a_window_takes_no_policy():
    with pytest.raises(ValueError, match="all layers of this mistral model have a window"):
        Engine(hybrid("mistral"), policy=POLICIES["H2O"])


def test_expected_attention_counts_the_sinks_of_the_model():
    policy = policies.ExpectedAttention(budget=Budget(tokens=4), sinks=1, future=1, covariance=False)
    keys, values, mean = torch.randn(3, 1, 2, 6, 8, generator=torch.Generator().manual_seed(0)).unbind()
    mean, sinks = mean[0, :, :2].flatten(0, 1), torch.tensor([-1.0, 0.5, 1.0, 2.0])
    entries = Entries(
        layer_index=0, num_layers=1, lengths=torch.full((1, 2), 6), num_entries=6, tokens_seen=torch.tensor([6]),
        memory=torch.empty(0), read_positions=lambda: torch.arange(6).int().expand(1, 2, 6), read_sums=dict,
        read_keys=lambda: keys, read_values=lambda: values, rotate=None, rotate_queries=lambda states, _: states,
        nominal=torch.tensor([4]), gathered=Moments(5, mean, torch.zeros(4, 8, 8)), attention_sinks=sinks,
    )  # fmt: skip
    found = policy.observe(entries, 4)[0]
    for head in range(2):
        assert found[head, 0] == torch.inf
        weights = torch.zeros(5)
        for query in (2 * head, 2 * head + 1):
            raised = (keys[0, head, 1:] @ mean[query]).exp()
            weights += raised / (raised.sum() + sinks[query].exp()) / 2
        expected = (weights + policy.epsilon) * values[0, head, 1:].norm(dim=-1)
        torch.testing.assert_close(found[head, 1:], expected)
