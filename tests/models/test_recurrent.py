"""Retrofits of models some of whose layers have no attention: the others get gates, these keep their states."""

from __future__ import annotations

import copy
import types

import numpy as np
import pytest
import torch
from conftest import mixed_gates, open_adapters
from oracles.step_by_step import HeadOracle
from runtime.test_recurrent import FAMILIES, NONE, recurrent
from runtime.test_windows import FULL, texts
from transformers import AutoModelForCausalLM

from dmc import Engine, SamplingParams, retrofit
from dmc.budget import Budget
from dmc.compression import CompressionConfig, GateMode, GateTrace
from dmc.models.gqa import merge_kv_heads
from dmc.models.masked_attention import Documents
from dmc.models.modeling import for_unpadded
from dmc.models.tensor_parallel import check_divides
from dmc.policies import SnapKV

RETROFITTED = [family for family in FAMILIES if family.startswith("qwen")]
GATES = ({}, {"delay": 4}, {"action": "drop", "delay": 4, "gate_input": "query"}, {"gate_input": "hidden"})
CLOSED = {"decision_offset": 1e4, "gate_input": "hidden"}
CLOSE = 3e-4
"""Of log-probabilities; the tiny models' range over 20 nats."""


def compressed(family, **gates):
    return open_adapters(retrofit(recurrent(family), mixed_gates(**gates)))


def parallel(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)


@pytest.mark.parametrize("gates", GATES, ids=str)
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_engine_and_generate_equal_the_parallel_form(family, gates):
    model, (tokens, other) = compressed(family, **gates), texts(150, 60)
    for chunk in (None, 40):
        (scored,) = Engine(model, prefill_chunk_size=chunk).score([tokens[:100]], [tokens[100:]])
        torch.testing.assert_close(scored, parallel(model, tokens)[99:-1], atol=CLOSE, rtol=0)
    greedy = SamplingParams(max_new_tokens=8, temperature=0)
    alone = [Engine(model).generate([prompt], greedy)[0].token_ids for prompt in (tokens, other)]
    padded = torch.tensor([tokens, other + [0] * 90])
    mask = torch.tensor([[1] * 150, [1] * 60 + [0] * 90])
    found = model.generate(padded, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert found[:, -8:].tolist() == alone
    with torch.no_grad():
        logits = model(padded.flip(0), attention_mask=mask.flip(0), use_cache=False).logits[0, 59]
    torch.testing.assert_close(logits.log_softmax(-1), parallel(model, other)[-1], atol=CLOSE, rtol=0)
    crowd = Engine(model, memory=2**18, max_batch_size=4, prefix_cache=True)
    for generation, expected in zip(
        crowd.generate([tokens, other] * 2, SamplingParams(max_new_tokens=8, temperature=0, n=2)),
        alone * 2,
        strict=True,
    ):
        assert [generation.token_ids, generation.alternatives[0].token_ids] == [expected] * 2


@pytest.mark.parametrize("gates", GATES[:3], ids=str)
def test_full_layers_equal_the_gates_token_by_token(gates):
    """Output gates, partial rotation and norms included."""
    model, (tokens,) = compressed("qwen3_5_text", **gates), texts(90)
    oracle, theta = copy.deepcopy(model).double(), model.config.rope_parameters["rope_theta"]
    for layer in oracle.compressed_layers:
        layer.self_attn.forward = types.MethodType(token_by_token(model.compression, theta), layer.self_attn)
    expected = parallel(oracle, tokens).float()
    (scored,) = Engine(model).score([tokens[:40]], [tokens[40:]])
    torch.testing.assert_close(scored, expected[39:-1], atol=CLOSE, rtol=0)


def token_by_token(compression, theta):
    """Return a forward of an attention layer that feeds the tokens of a text to its heads one after the other."""

    def forward(self, hidden_states, **_):
        rotated = self.head_dim // 4
        *projected, gate = self.project(hidden_states, rotated)
        query, key, value = (states[0].numpy() for states in projected)
        group, outputs = len(query) // len(key), np.zeros_like(query)
        for head in range(len(key)):
            members, oracle = (
                slice(head * group, (head + 1) * group),
                HeadOracle(compression, self.head_dim, theta, rotated),
            )
            for time in range(query.shape[1]):
                states = list(query[members, time]), key[head, time], value[head, time]
                outputs[members, time] = oracle.step(*states, self.scaling)
        attended = torch.from_numpy(outputs).transpose(0, 1).flatten(1)
        return self.o_proj(attended * gate[0].sigmoid())[None], None

    return forward


@pytest.mark.parametrize("family", RETROFITTED)
def test_documents_do_not_leak_through_states(family):
    """Of stock teachers and of compressed models alike; gradients neither."""
    first, second, third = texts(50, 1, 40)
    starts = torch.zeros(2, 91, dtype=torch.bool)
    starts[0, [0, 50, 51]] = True
    starts[1, 0] = True
    documents, ids = Documents.from_starts(starts), torch.tensor([first + second + third, texts(91, seed=5)[0]])
    teacher = for_unpadded(recurrent(family))
    for model in (teacher, compressed(family, delay=4), retrofit(recurrent(family), CompressionConfig(**CLOSED))):
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        logits = model(inputs_embeds=embedded, documents=documents, use_cache=False).logits
        for tokens, found in (
            (first, logits[0, :50]), (second, logits[0, 50:51]), (third, logits[0, 51:]), (ids[1].tolist(), logits[1]),
        ):  # fmt: skip
            torch.testing.assert_close(found.log_softmax(-1), parallel(model, tokens), atol=CLOSE, rtol=0)
        (gradient,) = torch.autograd.grad(logits[0, 60:].square().sum(), embedded)
        assert gradient[0, 51:].abs().sum() > 0 and not gradient[0, :51].any() and not gradient[1].any()


def test_a_stock_model_runs_and_generates_as_before_once_it_has_seen_documents():
    model, (tokens,) = recurrent("qwen3_next"), texts(40)
    ids, mask = torch.tensor([tokens, [0] * 9 + tokens[9:]]), torch.ones(2, 40, dtype=torch.long)
    mask[1, :9] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    before = model.generate(ids, **options)
    for_unpadded(model)
    model.set_attn_implementation("sdpa")
    assert torch.equal(model.generate(ids, **options), before)
    greedy = SamplingParams(max_new_tokens=6, temperature=0)
    assert Engine(model).generate([tokens], greedy)[0].token_ids == before[0, 40:].tolist()


@pytest.mark.parametrize("family", RETROFITTED)
def test_gates_of_attention_alone_are_traced_and_everything_learns(family):
    model, (tokens,), trace = compressed(family).train(), texts(60), GateTrace()
    ids = torch.tensor([tokens])
    model(ids, labels=ids, use_cache=False, gate_mode=GateMode(noise_seeds=[1]), gate_trace=trace).loss.backward()
    assert trace.stacked_alpha().shape == (2, 1, 2, 60)
    assert all(float(weight.grad.abs().sum()) > 0 for name, weight in model.named_parameters() if "experts" not in name)
    with torch.no_grad():
        model(ids, use_cache=False, gate_mode=GateMode(neuron_multiplier=0.5))


def test_beams_take_their_states_along():
    model, (tokens,) = compressed("qwen3_next"), texts(40)
    options = {"max_new_tokens": 20, "do_sample": False, "num_beams": 3, "num_return_sequences": 3}
    options |= {"output_scores": True, "return_dict_in_generate": True}
    found = model.generate(torch.tensor([tokens]), **options)
    for sequence, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        log_probs = parallel(model, sequence)[39:-1]
        mean = float(log_probs.gather(1, torch.tensor(sequence[40:])[:, None]).mean())
        assert mean == pytest.approx(score, abs=1e-3)


def test_a_policy_compresses_what_gates_leave_of_a_prompt():
    model, prompts = compressed("qwen3_next"), texts(120, 40)
    policy, greedy = SnapKV(budget=Budget(tokens=16), window=4), SamplingParams(max_new_tokens=6, temperature=0)
    alone = [Engine(model, policy=policy, prefill_chunk_size=30).generate([prompt], greedy)[0] for prompt in prompts]
    for generation, expected in zip(Engine(model, policy=policy).generate(prompts, greedy), alone, strict=True):
        assert generation.token_ids == expected.token_ids and int(generation.stats.slots.max()) <= 16 + 6


def test_an_exported_folder_loads_as_it_was(tmp_path):
    model, (tokens,) = compressed("qwen3_next", gate_input="hidden"), texts(80)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(
        parallel(AutoModelForCausalLM.from_pretrained(tmp_path), tokens), parallel(model, tokens)
    )


def test_heads_merge_where_there_is_attention():
    model = recurrent("qwen3_next")
    for attention in (layer.self_attn for layer in model.model.layers if hasattr(layer, "self_attn")):
        for projection in (attention.k_proj, attention.v_proj):
            projection.weight.data[16:] = projection.weight.data[:16]
    (tokens,) = texts(30)
    expected = parallel(model, tokens)
    torch.testing.assert_close(parallel(merge_kv_heads(model, 1), tokens), expected, atol=CLOSE, rtol=0)


def test_what_states_do_not_go_with_is_refused_in_one_line():
    config = recurrent("qwen3_5_text").config
    for sizes in ((2, 1), (1, 2)):
        with pytest.raises(ValueError, match=r"layer 0 of this qwen3_5_text model has no attention.* 2 ranks") as it:
            check_divides(config, *sizes)
        assert "\n" not in str(it.value)
    with pytest.raises(NotImplementedError, match="layer 0 of this qwen3_next model has no attention, nor have others"):
        retrofit(recurrent("qwen3_next", layer_types=[NONE] * 4), CompressionConfig())
    assert recurrent("qwen3_next").config.layer_types.count(FULL) == 2
