"""Policies in the engine beside their oracles, and entries built by hand."""

import warnings

import pytest
import torch
from oracles.policies import Trace, run
from torch import Tensor

from dmc import Engine, policies
from dmc.budget import Budget
from dmc.kernels.reference import eviction_candidate
from dmc.policies import Entries
from dmc.policies.protection import positions_held

TOLERANCE = 1e-4
PROMPT_LENGTHS, CONTINUATION_LENGTHS = (37, 22), (7, 5)
"""Ragged; the shorter prompt is below a budget of 24 tokens and goes over it while it is continued."""


def read_positions(cache, row):
    """Read the position of every entry, by layer and KV head, in ascending order."""
    return [[head.tolist() for head in heads] for heads in positions_held(cache, row)]


def serve(model, policy, prompts, continuations, **options):
    """Score continuations together, each prompt in the cache row of its number, and see what is held at the end."""
    engine, held = Engine(model, policy=policy, **options), {}
    close_row = engine.cache.close_row

    def look_and_close(row):
        held[row] = engine.cache.slots(row), read_positions(engine.cache, row)
        close_row(row)

    engine.cache.close_row = look_and_close
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of windows that do not fit
        log_probs = engine.score(prompts, continuations)
    assert engine.blocks_in_use == 0
    return [Trace(row_log_probs, *held[row]) for row, row_log_probs in enumerate(log_probs)]


@pytest.fixture
def scored():
    """Return `serve`."""
    return serve


@pytest.fixture
def assert_like_oracle(make_stock, make_prompts):
    """Return what compares a policy with its oracle, over a ragged batch that is scored together."""

    def compare(method, budget, group=2, oracle=None, prompt_lengths=PROMPT_LENGTHS, **options):
        """`oracle`: its options where they are not called as the policy's."""
        model = make_stock(group=group, num_layers=3)
        prompts = make_prompts(*prompt_lengths)
        continuations = make_prompts(*CONTINUATION_LENGTHS[: len(prompts)], seed=2)
        policy = getattr(policies, method)(budget=Budget(**budget), **options)
        traces = serve(model, policy, prompts, continuations)
        for prompt, continuation, trace in zip(prompts, continuations, traces, strict=True):
            expected = run(model, method, prompt, continuation, budget, **(options if oracle is None else oracle))
            assert trace.positions == expected.positions
            assert torch.equal(trace.slots, expected.slots)
            torch.testing.assert_close(trace.log_probs.double(), expected.log_probs, rtol=0, atol=TOLERANCE)

    return compare


@pytest.fixture
def assert_reads_like_oracle(make_stock, make_prompts):
    """Return what compares a policy that drops nothing with its oracle, by what is answered."""

    def compare(method, budget, prompts, steps, group=2, num_layers=2, oracle=None, **options):
        """`prompts` and `steps`: lengths of prompts and of what is scored after them."""
        model, texts = (
            make_stock(group=group, num_layers=num_layers),
            (make_prompts(*prompts), make_prompts(*steps, seed=2)),
        )
        engine = Engine(model, policy=getattr(policies, method)(budget=Budget(**budget), **options))
        for *text, scores in zip(*texts, engine.score(*texts), strict=True):
            expected = run(model, method, *text, budget, **(options if oracle is None else oracle)).log_probs
            torch.testing.assert_close(scores.double(), expected, rtol=0, atol=TOLERANCE)

    return compare


@pytest.fixture
def make_entries():
    """Return a builder of what one layer holds of one sequence whose heads are all full."""

    def build(heads, length, *, layer_index=0, num_layers=1, head_dim=2, **known):
        """Lists that are given become tensors; those of heads and entries get a sequence dimension in front."""
        keys, values = (
            torch.tensor(known.pop(name, torch.ones(heads, length, head_dim).tolist()))[None]
            for name in ("keys", "values")
        )
        sums = {name: torch.tensor(numbers)[None] for name, numbers in known.pop("sums", {}).items()}
        positions = torch.arange(length, dtype=torch.int32).expand(1, heads, length)
        limit = known.pop("limit", 0)
        parts = {name: as_tensor(numbers)[None] for name, numbers in known.items()}
        return Entries(
            layer_index=layer_index,
            num_layers=num_layers,
            lengths=torch.full((1, heads), length),
            num_entries=length,
            tokens_seen=torch.tensor([length]),
            memory=parts.pop("memory", torch.full((1, 1), torch.nan)),
            read_positions=lambda: positions,
            read_sums=lambda: sums,
            tokens=range(length),
            read_keys=lambda: keys,
            read_values=lambda: values,
            rotate=lambda states, turns: states,
            rotate_queries=lambda states, turns: states,
            nominal=torch.tensor([0]),
            limit=limit,
            **parts,
        )

    return build


@pytest.fixture
def evicted():
    """Return what says which entry of each head goes after a generated token, -1 for none."""

    def choose(policy, entries, limit):
        limits = torch.tensor([limit])
        scores = policy.scores(entries, limits)
        return eviction_candidate(scores, entries.positions, entries.lengths, limits)[0].tolist()

    return choose


def as_tensor(numbers):
    return numbers if isinstance(numbers, Tensor) else torch.tensor(numbers)
