"""Policies in models some of whose layers have a window or no attention: they act on the others."""

from pathlib import Path

import pytest
import torch
from evicting import write_scorer
from oracles.dense_hybrid import DenseHybrid, answers
from runtime.test_laws import FOLDER, POLICIES, QUARTER, READING
from runtime.test_recurrent import NONE, recurrent
from runtime.test_windows import FAMILIES, FULL, SLIDING, hybrid, own_tokens, texts

from dmc import Engine, SamplingParams, policies
from dmc.budget import Budget
from dmc.policies.base import Entries
from dmc.policies.expected_attention import Moments

TOLERANCE = 1e-4
ALL = {**POLICIES, **READING}
ALL["KVpop"] = policies.KVpop(budget=QUARTER, scorer=write_scorer(Path(FOLDER.name) / "of_six_layers", num_layers=6))
CROWDED = ["H2O", "LAVa", "KVzip", "OmniKV, offload", "Quest", "InfLLM"]


RECURRENT = ["qwen3_next", "qwen3_5_text"]


def deep(family="gpt_oss"):
    """Six layers with full attention among twelve, as OmniKV wants."""
    if family in RECURRENT:
        return recurrent(family, num_hidden_layers=12, layer_types=[NONE, FULL] * 6)
    return hybrid(family, 16, num_hidden_layers=12, layer_types=[SLIDING, FULL] * 6)


def with_budget(policy, budget):
    fields = {**policy.__dict__, "budget": budget}
    return type(policy)(**fields)


@pytest.mark.parametrize("family", [*(family for family in FAMILIES if family != "mistral"), *RECURRENT])
@pytest.mark.parametrize(("method", "options"), [("H2O", {}), ("SnapKV", {"window": 8, "kernel_size": 5})])
def test_full_layers_keep_what_a_dense_oracle_keeps(scored, family, method, options):
    model, (prompt, continuation) = (recurrent if family in RECURRENT else hybrid)(family), texts(240, 60)
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
        *(("gpt_oss", name) for name in ALL if name != "OmniKV, sparse"),  # which reads a part of prompts
        *(("qwen3_5_text", name) for name in CROWDED),
    ],
)
def test_a_budget_for_all_is_the_model_itself(family, method):
    model, (prompt, other) = deep(family), texts(60, 31)
    policy = with_budget(ALL[method], Budget(tokens=500))
    engine = Engine(model, policy=policy)
    for tokens, generation in zip(
        (prompt, other), engine.generate([prompt, other], SamplingParams(max_new_tokens=8, temperature=0)), strict=True
    ):
        assert generation.token_ids == own_tokens(model, tokens, 8)


@pytest.mark.parametrize(
    ("family", "method"), [*(("gpt_oss", name) for name in CROWDED), *(("qwen3_next", name) for name in CROWDED)]
)
@pytest.mark.filterwarnings("ignore:window=", "ignore:sinks=")
def test_a_crowd_with_forks_is_served_as_each_request_alone(family, method):
    model, prompts = deep(family), texts(60, 33)
    alone = Engine(model, policy=ALL[method], max_batch_size=1)
    greedy, several = (SamplingParams(max_new_tokens=8, temperature=0, n=n) for n in (1, 2))
    expected = [alone.generate([prompt], greedy)[0] for prompt in prompts]
    engine = Engine(model, policy=ALL[method], max_batch_size=4)
    for generation, wanted in zip(engine.generate(prompts, several), expected, strict=True):
        for ours in (generation, *generation.alternatives):
            assert ours.token_ids == wanted.token_ids
            assert torch.equal(ours.stats.slots, wanted.stats.slots) and ours.stats.slots.shape == (6, 2)
    assert engine.blocks_in_use == 0


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
