"""Retrofits of models some of whose layers have a window, or no attention: the others get gates, these stay stock."""

from __future__ import annotations

import copy
import types

import numpy as np
import pytest
import torch
from conftest import mixed_gates, open_adapters
from oracles.step_by_step import HeadOracle
from runtime.test_recurrent import FAMILIES as WITH_STATES
from runtime.test_recurrent import recurrent
from runtime.test_windows import hybrid, texts
from transformers import AutoModelForCausalLM

from dmc import Engine, SamplingParams, retrofit
from dmc.budget import Budget
from dmc.compression import CompressionConfig, GateMode, GateTrace
from dmc.models.masked_attention import Documents
from dmc.models.modeling import for_unpadded
from dmc.policies import SnapKV

WINDOWED = ("gemma3_text", "ministral", "exaone4", "cohere2", "gpt_oss")
RECURRENT = tuple(family for family in WITH_STATES if family.startswith("qwen"))
ONE_OF_EACH = ("gemma3_text", "qwen3_next")
GATES = ({}, {"delay": 4}, {"action": "drop", "delay": 4}, {"gate_input": "hidden", "window_size": None})
GATES_BESIDE_STATES = (
    {},
    {"delay": 4},
    {"action": "drop", "delay": 4, "gate_input": "query"},
    {"gate_input": "hidden"},
)
CLOSED = {"decision_offset": 1e4, "gate_input": "hidden"}
CLOSE, CLOSE_STATES = 1e-4, 3e-4
"""Of log-probabilities; those of the tiny models with states range over 20 nats."""


def stock(family):
    return recurrent(family) if family in RECURRENT else hybrid(family)


def compressed(family, **gates):
    return open_adapters(retrofit(stock(family), mixed_gates(**gates)))


def parallel(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)


def in_turn(families, gates, first=0):
    """Pair each family with gates in turn, the first of them `gates[first]`; with the next ones in the full tier."""
    count = len(gates)
    return [
        pytest.param(family, gates[(first + number + turn) % count], marks=pytest.mark.slow if turn else ())
        for turn in (0, 1)
        for number, family in enumerate(families)
    ]


@pytest.mark.parametrize(
    ("family", "gates"),
    [*in_turn(WINDOWED, GATES), *in_turn(("qwen3_next", "qwen3_5_text"), GATES_BESIDE_STATES, 2)],
    ids=str,
)
def test_engine_and_generate_equal_the_parallel_form(family, gates):
    model, (tokens, other) = compressed(family, **gates), texts(150, 60)
    close = CLOSE_STATES if family in RECURRENT else CLOSE
    for chunk in (None, 40):
        (scored,) = Engine(model, prefill_chunk_size=chunk).score([tokens[:100]], [tokens[100:]])
        torch.testing.assert_close(scored, parallel(model, tokens)[99:-1], atol=close, rtol=0)
    greedy = SamplingParams(max_new_tokens=8, temperature=0)
    alone = [Engine(model).generate([prompt], greedy)[0].token_ids for prompt in (tokens, other)]
    padded = torch.tensor([tokens, other + [0] * 90])
    mask = torch.tensor([[1] * 150, [1] * 60 + [0] * 90])
    found = model.generate(padded, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert found[:, -8:].tolist() == alone
    with torch.no_grad():
        logits = model(padded.flip(0), attention_mask=mask.flip(0), use_cache=False).logits[0, 59]
    torch.testing.assert_close(logits.log_softmax(-1), parallel(model, other)[-1], atol=close, rtol=0)
    crowd = Engine(model, memory=2**18, max_batch_size=4, prefix_cache=True)
    for generation, expected in zip(
        crowd.generate([tokens, other] * 2, SamplingParams(max_new_tokens=8, temperature=0, n=2)),
        alone * 2,
        strict=True,
    ):
        assert [generation.token_ids, generation.alternatives[0].token_ids] == [expected] * 2


@pytest.mark.parametrize(
    ("family", "gates"),
    [*in_turn(("gemma3_text", "ministral"), GATES[:3], 1), *in_turn(["qwen3_5_text"], GATES_BESIDE_STATES[:3], 2)],
    ids=str,
)
def test_full_layers_equal_the_gates_token_by_token(family, gates):
    """Output gates, partial rotation and norms included."""
    model, (tokens,) = compressed(family, **gates), texts(90)
    oracle = copy.deepcopy(model).double()
    rope = model.config.rope_parameters
    theta = rope.get("full_attention", rope)["rope_theta"]
    is_recurrent = family in RECURRENT
    forward = token_by_token(model.compression, theta, rotated_part=4 if is_recurrent else 1)
    for layer in oracle.compressed_layers:
        layer.self_attn.forward = types.MethodType(forward, layer.self_attn)
    expected = parallel(oracle, tokens).float()
    (scored,) = Engine(model).score([tokens[:40]], [tokens[40:]])
    torch.testing.assert_close(scored, expected[39:-1], atol=CLOSE_STATES if is_recurrent else CLOSE, rtol=0)


def token_by_token(compression, theta, rotated_part):
    """Return a forward of an attention layer that feeds the tokens of a text to its heads one after the other."""

    def forward(self, hidden_states, **_):
        rotated = self.head_dim // rotated_part
        *projected, gate = self.project(hidden_states, rotated)
        query, key, value = (states[0].numpy() for states in projected)
        group, outputs = len(query) // len(key), np.zeros_like(query)
        for head in range(len(key)):
            members = slice(head * group, (head + 1) * group)
            oracle = HeadOracle(compression, self.head_dim, theta, rotated)
            for time in range(query.shape[1]):
                states = list(query[members, time]), key[head, time], value[head, time]
                outputs[members, time] = oracle.step(*states, self.scaling)
        attended = torch.from_numpy(outputs).transpose(0, 1).flatten(1)
        return self.o_proj(attended if gate is None else attended * gate[0].sigmoid())[None], None

    return forward


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_beams_take_their_windows_and_states_along(family):
    model, (tokens,) = compressed(family), texts(40)
    options = {"max_new_tokens": 40, "do_sample": False, "num_beams": 3, "num_return_sequences": 3}
    options |= {"output_scores": True, "return_dict_in_generate": True}
    found = model.generate(torch.tensor([tokens]), **options)
    for sequence, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        log_probs = parallel(model, sequence)[39:-1]
        mean = float(log_probs.gather(1, torch.tensor(sequence[40:])[:, None]).mean())
        assert mean == pytest.approx(score, abs=1e-3)


@pytest.mark.parametrize("family", WINDOWED)
def test_documents_bound_windows_too(family):
    """Of stock teachers and of compressed models alike, with gradients."""
    first, second = texts(70, 50)
    starts = torch.zeros(1, 120, dtype=torch.bool)
    starts[0, [0, 70]] = True
    documents, positions = Documents.from_starts(starts), torch.tensor([[*range(70), *range(50)]])
    teacher = for_unpadded(hybrid(family))
    for model in (teacher, compressed(family, delay=4), retrofit(hybrid(family), CompressionConfig(**CLOSED))):
        with torch.no_grad():
            together = model(
                torch.tensor([first + second]), position_ids=positions, documents=documents, use_cache=False
            ).logits[0]
        for tokens, logits in ((first, together[:70]), (second, together[70:])):
            torch.testing.assert_close(logits.log_softmax(-1), parallel(model, tokens), atol=CLOSE, rtol=0)


@pytest.mark.parametrize("family", WINDOWED + RECURRENT)
def test_gates_of_full_layers_alone_are_traced_and_everything_learns(family):
    model, (tokens,), trace = compressed(family).train(), texts(60), GateTrace()
    ids = torch.tensor([tokens])
    model(ids, labels=ids, use_cache=False, gate_mode=GateMode(noise_seeds=[1]), gate_trace=trace).loss.backward()
    assert trace.stacked_alpha().shape == (2, 1, 2, 60)
    assert all(float(weight.grad.abs().sum()) > 0 for name, weight in model.named_parameters() if "experts" not in name)
    with torch.no_grad():
        model(ids, use_cache=False, gate_mode=GateMode(neuron_multiplier=0.5))


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_a_policy_compresses_what_gates_leave_of_a_prompt(family):
    model, prompts = compressed(family), texts(120, 40)
    policy, greedy = SnapKV(budget=Budget(tokens=16), window=4), SamplingParams(max_new_tokens=6, temperature=0)
    alone = [Engine(model, policy=policy, prefill_chunk_size=30).generate([prompt], greedy)[0] for prompt in prompts]
    for generation, expected in zip(Engine(model, policy=policy).generate(prompts, greedy), alone, strict=True):
        assert generation.token_ids == expected.token_ids and int(generation.stats.slots.max()) <= 16 + 6


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_an_exported_folder_loads_as_it_was(family, tmp_path):
    model, (tokens,) = compressed(family, gate_input="hidden"), texts(80)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(
        parallel(AutoModelForCausalLM.from_pretrained(tmp_path), tokens), parallel(model, tokens)
    )


def test_a_model_without_full_attention_is_refused_in_one_line():
    with pytest.raises(
        NotImplementedError, match=r"layer 0 of this mistral model has a sliding window of 24 .*all"
    ) as it:
        retrofit(hybrid("mistral"), CompressionConfig())
    assert "\n" not in str(it.value)
