"""Queries and keys turn to other positions as the model itself turns them, whatever its family does."""

import copy

import pytest
import torch
from runtime.test_recurrent import recurrent
from runtime.test_stock_attention import build
from runtime.test_windows import hybrid
from tiny_families import stock_of
from torch import nn

from dmc import Engine, SamplingParams, policies
from dmc.budget import Budget
from dmc.models import FAMILIES
from dmc.runtime.model_rotary import rotary_of, try_out

TOLERANCE = 2e-4
MANY = {"cohere", "glm", "glm4_moe", "ernie4_5", "smollm3", "hunyuan_v1_dense", "qwen3_next", "gemma3_text", "gpt_oss"}
ROTATING = {
    "StreamingLLM": policies.StreamingLLM(budget=Budget(tokens=12), sinks=3, rerotate=True),
    "ExpectedAttention": policies.ExpectedAttention(budget=Budget(tokens=12), sinks=2, future=20),
    "InfLLM": policies.InfLLM(budget=Budget(tokens=14), block_size=4, representatives=2, initial=2, local=6, chunk=8),
}


def found(model):
    engine = Engine(model)
    return rotary_of(model, try_out(engine._runner._view, engine.cache)), engine.cache.layout


def own_states(model, position):
    """Queries and keys, [heads, D], of every layer of a model that reads one token at a position, by itself."""
    seen = {}

    def keep(module, query, key, value, *_, **__):
        seen[module.layer_idx] = query[0, :, 0], key[0, :, 0]
        return torch.zeros_like(query).transpose(1, 2), None

    from transformers import AttentionInterface

    AttentionInterface.register("kept_by_the_test", keep)
    before = model.config._attn_implementation
    model.set_attn_implementation("kept_by_the_test")
    try:
        with torch.no_grad():
            model(torch.tensor([[41]]), position_ids=torch.tensor([[position]]), use_cache=False)
    finally:
        model.set_attn_implementation(before)
    return seen


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in MANY else pytest.mark.slow) for name in sorted(FAMILIES)]
)
def test_states_of_one_position_turn_into_those_of_another(family):
    model = copy.deepcopy(stock_of(family))
    rotary, layout = found(model)
    at = {position: own_states(model, position) for position in (5, 13)}
    full = [index for index, place in enumerate(layout.places) if layout.window_of(place) is None]
    assert full
    for index in full:
        for first, second in ((5, 13), (13, 5)):
            turns = torch.tensor([[second - first]])
            for which, turn in enumerate((rotary.turn_queries, rotary.turn_keys)):
                (before, after) = (at[position][index][which] for position in (first, second))
                turned = turn(layout.places[index], before[None, :, None], turns)[0, :, 0]
                torch.testing.assert_close(turned, after, atol=TOLERANCE, rtol=TOLERANCE)


def twins():
    """Two models that compute the same: one turns neighboring channels, the other halves."""
    neighbors = build("ernie4_5", num_hidden_layers=3, max_position_embeddings=256, rms_norm_eps=1e-6)
    halves = build("llama", num_hidden_layers=3, max_position_embeddings=256, rms_norm_eps=1e-6)
    states = {name: value.clone() for name, value in neighbors.state_dict().items()}
    order = torch.cat((torch.arange(0, 16, 2), torch.arange(1, 16, 2)))
    for name, value in states.items():
        if "q_proj" in name or "k_proj" in name:
            states[name] = value.unflatten(0, (-1, 16))[:, order].flatten(0, 1)
    halves.load_state_dict(states)
    halves.config.rope_parameters = neighbors.config.rope_parameters
    halves.model.rotary_emb = type(halves.model.rotary_emb)(halves.config)
    return neighbors, halves


@pytest.mark.parametrize("method", ROTATING)
def test_a_method_does_with_neighbors_what_it_does_with_halves(method):
    models, generator = twins(), torch.Generator().manual_seed(2)
    text = torch.randint(83, (90,), generator=generator).tolist()
    expected, given = (
        Engine(model, policy=ROTATING[method]).score_with_stats([text[:60], text[:31]], [text[60:], text[31:50]])
        for model in models
    )
    plain = Engine(models[0]).score([text[:60]], [text[60:]])[0]
    assert (expected[0].logprobs - plain).abs().max() > 1e-2  # the method does something
    for mine, theirs in zip(expected, given, strict=True):
        torch.testing.assert_close(mine.logprobs, theirs.logprobs, atol=TOLERANCE, rtol=TOLERANCE)
        assert torch.equal(mine.stats.slots, theirs.stats.slots)


@pytest.mark.parametrize("method", ROTATING)
def test_without_rotation_nothing_turns(method):
    """In a layer that does not rotate a token is the same everywhere: positions are not even asked for."""
    model = build("smollm3", num_hidden_layers=2, no_rope_layers=[0, 0], max_position_embeddings=256)
    engine = Engine(model, policy=ROTATING[method])
    states = torch.randn(1, 2, 5, 16)
    rotary = rotary_of(model, try_out(engine._runner._view, engine.cache))
    assert torch.equal(rotary.turn_keys(1, states, torch.arange(5)[None]), states)
    engine.generate([list(range(60))], SamplingParams(max_new_tokens=8, temperature=0))


@pytest.mark.parametrize("build_model", [lambda: recurrent("qwen3_next"), lambda: hybrid("gemma3_text", 24)])
def test_layers_with_a_window_or_without_attention_are_left_out(build_model):
    rotary, layout = found(build_model())
    assert len(rotary._turns) == layout.num_layers == 2


def test_a_window_as_long_as_the_context_turns_by_its_own_tables():
    """Layers that count as full although their kind slides have the tables of their kind."""
    model = hybrid("gemma3_text", 512)
    rotary, layout = found(model)
    assert layout.num_layers == 4
    at = {position: own_states(model, position) for position in (2, 9)}
    for index in range(4):
        turned = rotary.turn_keys(index, at[2][index][1][None, :, None], torch.tensor([[7]]))[0, :, 0]
        torch.testing.assert_close(turned, at[9][index][1], atol=TOLERANCE, rtol=TOLERANCE)


class Learned(nn.Linear):
    """Keys that depend on positions in a way of its own."""

    def forward(self, states):
        return super().forward(states) + torch.arange(states.shape[1])[None, :, None]


@pytest.mark.parametrize("method", ROTATING)
def test_a_way_of_its_own_is_refused_when_the_engine_is_built(method):
    model = build("llama")
    model.model.layers[1].self_attn.k_proj = Learned(48, 32)
    with pytest.raises(NotImplementedError, match="layer 1 of this llama model does not use its family"):
        Engine(model, policy=ROTATING[method])
    Engine(model, policy=policies.H2O(budget=Budget(ratio=2)))


def test_a_policy_that_turns_and_does_not_say_so_is_told(make_stock):
    class Silent(policies.StreamingLLM):
        rotates = False

    engine = Engine(make_stock(), policy=Silent(budget=Budget(tokens=8), rerotate=True))
    with pytest.raises(TypeError, match="Silent turns queries or keys: let its `rotates` say so"):
        engine.generate([list(range(20))], SamplingParams(max_new_tokens=3, temperature=0))
