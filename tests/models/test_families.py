"""Every family of the table, tiny: closed gates are the stock model, and every law holds with open gates."""

import copy
import itertools
import sys

import pytest
import torch
from tiny_families import CONVENTIONS, compressed_of, stock_of, texts
from transformers import AutoModelForCausalLM

from dmc import Engine, SamplingParams, load_model
from dmc.budget import Budget
from dmc.compression import GateMode, full_attention_tables
from dmc.models import FAMILIES, next_tokens, with_token_losses
from dmc.models.token_losses import IGNORED
from dmc.models.weights import check_weights, open_weights
from dmc.policies import H2O, KVzip, SnapKV

TOLERANCE = 1e-5  # of float32 logits, relative to their largest
NEIGHBORS = {"cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium"}
PARTLY = {"glm": 8, "glm4": 8, "glm4_moe": 8, "qwen3_next": 4, "qwen3_5_text": 4, "qwen3_5_moe_text": 4}
SHORT, GREEDY = (SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True) for count in (6, 12))


def logits_of(model, ids, **options):
    with torch.no_grad():
        return model(ids, use_cache=False, **options).logits


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_closed_gates_are_the_stock_model(family):
    stock, ids = stock_of(family), torch.tensor(texts(40, 40))
    expected = logits_of(stock, ids)
    closed = compressed_of(family, gate_input="hidden", decision_offset=5.0)  # its adapter starts at 0
    assert_close(logits_of(closed, ids), expected)
    borrowing = compressed_of(family, neuron_index=3)
    assert_close(logits_of(borrowing, ids, gate_mode=GateMode(neuron_multiplier=1.0)), expected)
    (scored,) = Engine(closed, prefill_chunk_size=16).score([ids[0, :9].tolist()], [ids[0, 9:].tolist()])
    torch.testing.assert_close(scored, expected[0, 8:-1].log_softmax(-1), rtol=0, atol=5e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_with_open_gates_is_the_parallel_form(family, tmp_path):
    """Prefill = decode, and a folder = the model in memory."""
    model, prompts = compressed_of(family), texts(30, 17)
    engine = Engine(model)
    for prompt, generated in zip(prompts, engine.generate(prompts, SHORT), strict=True):
        sequence = torch.tensor([prompt + generated.token_ids])
        parallel = logits_of(model, sequence[:, :-1])
        assert parallel[0, len(prompt) - 1 :].argmax(-1).tolist() == generated.token_ids
        assert 1.05 < generated.stats.achieved_ratio < 8
    decoded = engine.score([prompts[0][:1]], [prompts[0][1:]])[0]
    torch.testing.assert_close(
        decoded, logits_of(model, torch.tensor(prompts[:1]))[0, :-1].log_softmax(-1), rtol=0, atol=5e-5
    )
    model.save_pretrained(tmp_path)
    for load in (load_model, AutoModelForCausalLM.from_pretrained)[: 1 + (family in CONVENTIONS)]:
        loaded = load(tmp_path)
        assert type(loaded) is type(model)
        assert_close(logits_of(loaded, sequence), logits_of(model, sequence))


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_without_logits_are_the_stock_models(family):
    ids = torch.tensor(texts(20, 20))
    stock = stock_of(family)
    aux = hasattr(sys.modules[type(stock).__module__], "load_balancing_loss_func")
    model = with_token_losses(compressed_of(family, gate_input="hidden", decision_offset=5.0))
    if aux:
        stock = copy.deepcopy(stock)
        stock.config.output_router_logits = model.config.output_router_logits = True
    with torch.no_grad():
        expected = stock(ids, labels=ids, use_cache=False)
        targets = next_tokens(ids)
        losses = model(ids, targets=targets, use_cache=False)
    loss = losses.cross_entropy.sum() / (targets != IGNORED).sum()
    assert (losses.aux_loss is not None) == aux
    if aux:
        torch.testing.assert_close(losses.aux_loss, model.config.router_aux_loss_coef * expected.aux_loss)
        loss = loss + losses.aux_loss
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_borrowed_neuron_is_the_last_channel_and_turns_slowest_or_not_at_all(family):
    model = compressed_of(family)
    attention = model.compressed_layers[0].self_attn
    assert {rows.start for _, rows in model.neuron_rows()} == {15}
    tables = full_attention_tables(model.model.rotary_emb, torch.zeros(1), torch.tensor([[1]]))
    cos, sin = attention.rotation.whole(tables)
    assert cos.shape[-1] == PARTLY.get(family, 16)
    assert attention.rotation.neighbors == (family in NEIGHBORS)
    states = torch.zeros(1, 1, 1, 16)
    states[..., 15] = 1.0
    turned = attention.modeling.apply_rotary_pos_emb(states, states, *tables)[1].flatten()
    others = [channel for channel, value in enumerate(turned.tolist()) if value and channel != 15]
    slowest = attention.rotary_tables((cos, sin), torch.float32)[1].abs()[0, 0, :8].min()
    if not attention.rotates:
        assert slowest == 0
    elif family in PARTLY:
        assert others == [] and turned[15] == 1
    else:
        assert others == [14 if family in NEIGHBORS else 7]
        assert turned[others[0]].abs() == slowest < 0.1


EXPERTS = [family for family, model in FAMILIES.items() if "experts" in str(model.config_class.base_model_tp_plan)]


@pytest.mark.parametrize("family", EXPERTS)
def test_weights_of_experts_are_read_as_transformers_does(family, tmp_path):
    stock = stock_of(family)
    stock.save_pretrained(tmp_path)
    stored = open_weights(tmp_path)
    check_weights(tmp_path)
    weights = stock.state_dict()
    assert stored.keys() == weights.keys()
    for name, weight in weights.items():
        assert stored[name].get_shape() == [*weight.shape]
        assert torch.equal(stored[name][:], weight)
        if weight.dim() == 3:
            assert torch.equal(stored[name][1:3, 5:40, 2:9], weight[1:3, 5:40, 2:9])
    assert_close(logits_of(load_model(tmp_path), torch.tensor(texts(9))), logits_of(stock, torch.tensor(texts(9))))


def each_of(generation):
    return [sample.token_ids for sample in (generation, *generation.alternatives)]


UNLIKE = ("glm4_moe", "ministral3", "qwen3_next", "gpt_oss")
"""What others do with positions, states and windows is a part of what these do."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=() if family in UNLIKE else pytest.mark.slow) for family in CONVENTIONS],
    ids=CONVENTIONS.values(),
)
def test_a_family_of_each_convention_is_served_under_load(family):
    """Little memory: sequences are preempted, forked, and share what they begin with."""
    model, prompts = compressed_of(family, delay=3), [texts(40)[0] + rest for rest in texts(5, 9, 14)]
    params = [SamplingParams(max_new_tokens=16, seed=number, n=2, ignore_eos=True) for number in range(3)]
    alone = [Engine(model).generate([prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
    room = 2 * 2 * 5 * Engine(model).cache.block_bytes  # two layers of two heads, the longest text uncompressed
    engine = Engine(model, memory=room, prefill_chunk_size=16, prefix_cache=True)
    together = engine.generate(prompts, params)
    assert [each_of(generation) for generation in together] == [each_of(generation) for generation in alone]
    assert any(
        sample.stats.num_preemptions for generation in together for sample in (generation, *generation.alternatives)
    )


IN_TURN = [*zip(CONVENTIONS, itertools.cycle((H2O, SnapKV, KVzip)), strict=False)]
"""Each convention with one policy; with KVzip, which reads a prompt twice, all of them in the full tier."""
REPEATED = [(family, KVzip) for family in CONVENTIONS if (family, KVzip) not in IN_TURN]


@pytest.mark.parametrize(
    ("family", "policy"),
    [*IN_TURN, *(pytest.param(*row, marks=pytest.mark.slow) for row in REPEATED)],
    ids=lambda value: CONVENTIONS.get(value) if isinstance(value, str) else value.__name__,
)
def test_a_family_of_each_convention_serves_policies(family, policy):
    """A budget beyond the text changes nothing, half of it is kept, together as alone."""
    stock, prompts = stock_of(family), texts(48, 33)
    expected = Engine(stock).generate(prompts, GREEDY)
    wide = Engine(stock, policy=policy(budget=Budget(tokens=200))).generate(prompts, GREEDY)
    assert [each_of(generation) for generation in wide] == [each_of(generation) for generation in expected]
    engine = Engine(stock, policy=policy(budget=Budget(ratio=2.0)))
    together = engine.generate(prompts, GREEDY)
    alone = [engine.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert [each_of(generation) for generation in together] == [each_of(generation) for generation in alone]
    assert all(1.5 < generation.stats.achieved_ratio < 2.6 for generation in together)
