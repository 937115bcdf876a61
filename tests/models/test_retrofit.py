import copy
import importlib
import json
import warnings
from contextlib import contextmanager

import pytest
import torch
from oracles.step_by_step import ModelOracle
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from dmc import Engine, load_model, retrofit
from dmc.compression import CompressionConfig, GateMode, GateTrace, compression_loss

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
TOLERANCE = 1e-4  # float32 log-probs against float64
CLOSED = 1e6  # decision_offset at which nothing merges

MERGE = [{"window_size": window, "delay": delay} for window in (1, 3, 12, None) for delay in (0, 1, 4, 16)]
DROP = [{"action": "drop", "delay": delay} for delay in (1, 4, 16)]
SHARED = [{"decisions": "per_layer", "delay": delay} for delay in (0, 4)]
SHARED += [{"decisions": "per_layer", "action": "drop", "delay": 4}, {"decisions": "per_layer", "weighting": "uniform"}]
UNIFORM = [{"weighting": "uniform"}, {"weighting": "uniform", "window_size": None, "delay": 4}]
ADAPTED = [{"gate_input": "hidden"}, {"gate_input": "both", "delay": 4, "decision_scale": 2.0}]
ADAPTED += [{"gate_input": "hidden", "action": "drop", "delay": 4}, {"gate_input": "both", "decisions": "per_layer"}]
ADAPTED += [{"gate_input": "query", "action": "drop", "delay": 3, "neuron_index": 5, "decision_scale": 4.0}]
PREVIOUS = [{"decided_token": "previous", "action": "drop", "delay": delay} for delay in (1, 4, 16)]
PREVIOUS += [{"decided_token": "previous", "delay": 4}, {"decided_token": "previous", "delay": 1, "window_size": None}]
PREVIOUS += [PREVIOUS[0] | {"gate_input": "query", "delay": 9}, PREVIOUS[0] | {"decisions": "per_layer", "delay": 3}]
FIXED = [
    {"decisions": "fixed", "weighting": "uniform", "window_size": window, "delay": delay, "target_ratio": ratio}
    for window, delay, ratio in ((None, 0, 4.0), (None, 4, 4.0), (3, 0, 4.0), (3, 4, 2.5), (12, 0, 2.5), (None, 4, 1.3))
]


def name_of(gates):
    return "-".join(f"{key}={value}" for key, value in gates.items())


def parallel_log_probs(model, tokens, **options):
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False, **options).logits[0]
    return logits.log_softmax(-1)


def difference(ours, theirs):
    return (ours.double() - theirs.double()).abs().max().item()


@pytest.fixture
def without_neuron(monkeypatch):
    """Return a context that removes a channel of queries and keys around RoPE inside a stock model's own attention."""

    @contextmanager
    def remove(family, channel):
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        stock_rotation = module.apply_rotary_pos_emb

        def rotation(query, key, *args, **kwargs):
            query, key = query.clone(), key.clone()
            query[..., channel] = key[..., channel] = 0
            query, key = stock_rotation(query, key, *args, **kwargs)
            query[..., channel] = key[..., channel] = 0
            return query, key

        with monkeypatch.context() as patched:
            patched.setattr(module, "apply_rotary_pos_emb", rotation)
            yield

    return remove


@pytest.mark.parametrize(("family", "neuron"), zip(FAMILIES, (-1, 3, 3, -1), strict=True))
def test_closed_gates_are_the_stock_model_without_the_neuron(family, neuron, make_stock, make_prompts, without_neuron):
    stock = make_stock(family)
    tokens = make_prompts(150)[0]
    with without_neuron(family, neuron):
        expected = parallel_log_probs(stock, tokens)
    for gates in ({}, {"window_size": None}, {"delay": 4}, {"action": "drop", "delay": 16}):
        model = retrofit(copy.deepcopy(stock), CompressionConfig(neuron_index=neuron, decision_offset=CLOSED, **gates))
        assert difference(parallel_log_probs(model, tokens), expected) < TOLERANCE, gates
        scored = Engine(model).score([tokens[:100]], [[*tokens[100:], 0]])[0]
        assert difference(scored, expected[99:]) < TOLERANCE, gates


@pytest.mark.parametrize("delay", [0, 4])
def test_fixed_pooling_at_ratio_one_is_the_stock_model(delay, make_stock, make_prompts):
    stock, tokens = make_stock(), make_prompts(60)[0]
    expected = parallel_log_probs(stock, tokens)
    model = retrofit(copy.deepcopy(stock), CompressionConfig(**{**FIXED[0], "delay": delay, "target_ratio": 1.0}))
    for mode in (None, GateMode(noise_seeds=[1], fixed_ratio=1.0)):
        assert difference(parallel_log_probs(model, tokens, gate_mode=mode), expected) < TOLERANCE / 10
    assert difference(Engine(model).score([tokens[:9]], [[*tokens[9:], 0]])[0], expected[8:]) < TOLERANCE / 10
    assert not [*model.neuron_rows()]


@pytest.mark.parametrize("gates", [{"delay": 40}, {"action": "drop", "delay": 40}, {"delay": 1000}], ids=name_of)
def test_a_delay_beyond_the_sequence_compresses_nothing(gates, make_stock, make_prompts):
    tokens = make_prompts(40)[0]
    closed = retrofit(make_stock(), CompressionConfig(decision_offset=CLOSED))
    opened = retrofit(make_stock(), CompressionConfig(decision_offset=-CLOSED, **gates))
    expected = parallel_log_probs(closed, tokens)
    assert difference(parallel_log_probs(opened, tokens), expected) < TOLERANCE
    assert difference(Engine(opened).score([tokens[:9]], [[*tokens[9:], 0]])[0], expected[8:]) < TOLERANCE


@pytest.mark.parametrize(
    ("gates", "group"),
    [
        *((gates, 2) for gates in MERGE + DROP + SHARED + UNIFORM + ADAPTED + PREVIOUS + FIXED),
        *((gates, group) for group in (1, 4) for gates in (MERGE[9], DROP[1], SHARED[1], ADAPTED[1], PREVIOUS[-2])),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else name_of(value),
)
def test_parallel_forward_and_engine_equal_the_step_by_step_oracle(gates, group, make_compressed, make_prompts):
    model = make_compressed(group=group, gates=gates)
    sequences = make_prompts(3, 17, 40)
    runs = [ModelOracle(model, model.compression).run(sequence) for sequence in sequences]
    scores = Engine(model).score(
        [sequence[:2] for sequence in sequences], [[*sequence[2:], 0] for sequence in sequences]
    )
    for sequence, run, score in zip(sequences, runs, scores, strict=True):
        assert difference(parallel_log_probs(model, sequence), run.log_probs) < TOLERANCE
        assert difference(score, run.log_probs[1:]) < TOLERANCE
    assert 0.1 < runs[-1].decisions.float().mean() < 0.9


@pytest.mark.parametrize(
    ("family", "gates"),
    zip(FAMILIES, [{}, {"delay": 3, "window_size": 2}, {"action": "drop", "delay": 2}, {"delay": 2}], strict=True),
    ids=str,
)
def test_every_family_equals_the_oracle(family, gates, make_stock, make_gates, make_prompts):
    stock, settings = make_stock(family, seed=3), make_gates(neuron_index=2, **gates)
    tokens = make_prompts(30)[0]
    run = ModelOracle(stock, settings).run(tokens)
    model = retrofit(stock, settings)
    assert difference(parallel_log_probs(model, tokens), run.log_probs) < TOLERANCE
    assert difference(Engine(model).score([tokens[:5]], [[*tokens[5:], 0]])[0], run.log_probs[4:]) < TOLERANCE


@pytest.mark.parametrize("gates", [{}, {"window_size": None, "delay": 5}, {"action": "drop", "delay": 4}], ids=name_of)
def test_long_sequences_equal_the_oracle(gates, make_stock, make_gates, make_prompts):
    stock, settings = make_stock(group=4, num_layers=1), make_gates(**gates)
    tokens = make_prompts(300)[0]
    run = ModelOracle(stock, settings).run(tokens)
    model = retrofit(stock, settings)
    assert difference(parallel_log_probs(model, tokens), run.log_probs) < TOLERANCE
    assert difference(Engine(model).score([tokens[:-1]], [[tokens[-1], 0]])[0], run.log_probs[-2:]) < TOLERANCE


@pytest.mark.parametrize(
    "gates",
    [{}, {"delay": 4}, {"action": "drop", "delay": 4}, {"window_size": None}, SHARED[0], PREVIOUS[5], FIXED[1]],
    ids=name_of,
)
def test_activation_checkpointing_changes_nothing(gates, make_compressed, make_prompts):
    input_ids = torch.tensor(make_prompts(24, 24))
    results = []
    for checkpointed in (False, True):
        model = make_compressed(gates=gates).train()
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        trace = GateTrace()
        output = model(
            input_ids, labels=input_ids, use_cache=False, gate_mode=GateMode(noise_seeds=[11, 12]), gate_trace=trace
        )
        alpha = trace.stacked_alpha().detach().clone()
        assert alpha.shape == (2, 2, 2, 24)
        loss = output.loss + compression_loss(trace.stacked_alpha(), 8.0)
        loss.backward()
        torch.testing.assert_close(trace.stacked_alpha(), alpha, rtol=0, atol=0)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert all(gradient is not None for gradient in gradients.values())
        results.append((loss.detach(), alpha, gradients))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_recomputed_layers_are_not_held_by_the_trace(make_compressed, make_prompts):
    model, trace = make_compressed(num_layers=3).train(), GateTrace()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model(torch.tensor(make_prompts(24)), use_cache=False, gate_mode=GateMode(noise_seeds=[1]), gate_trace=trace)
    alpha, logits = dict(trace.alpha), dict(trace.logits)
    compression_loss(trace.stacked_alpha(), 8.0).backward()
    assert all(trace.alpha[index] is alpha[index] and trace.logits[index] is logits[index] for index in range(3))


def test_compression_loss_reaches_the_neuron_alone(make_compressed, make_prompts):
    model = make_compressed(num_layers=1).train()
    trace = GateTrace()
    model(torch.tensor(make_prompts(24)), use_cache=False, gate_mode=GateMode(noise_seeds=[1]), gate_trace=trace)
    compression_loss(trace.stacked_alpha(), 8.0).backward()
    gradient = model.model.layers[0].self_attn.k_proj.weight.grad.view(2, 16, -1)
    assert gradient[:, -1].abs().min() > 0
    assert not gradient[:, :-1].any()
    assert model.model.layers[0].self_attn.q_proj.weight.grad is None


def test_trace_holds_each_layer_once_with_starts_appended(make_compressed, make_prompts):
    model, trace = make_compressed(num_layers=3, group=1), GateTrace()
    parallel_log_probs(model, make_prompts(9)[0], gate_trace=trace)
    assert trace.stacked_alpha().shape == (3, 1, 4, 9)
    assert not trace.stacked_alpha()[..., 0].any()
    assert set(trace.stacked_alpha().unique().tolist()) == {0, 1}


def test_trace_agrees_with_the_decisions_of_the_oracle(make_stock, make_gates, make_prompts):
    stock, tokens, trace = make_stock(), make_prompts(40)[0], GateTrace()
    run = ModelOracle(stock, make_gates()).run(tokens)
    parallel_log_probs(retrofit(stock, make_gates()), tokens, gate_trace=trace)
    assert torch.equal(trace.stacked_alpha()[:, 0].long(), run.decisions)


BORROWING = [{}, {"gate_input": "both", "neuron_index": 3}]
BORROWING += [
    {"gate_input": "query", "action": "drop", "delay": 4, "decision_scale": 100.0, "neuron_index": index}
    for index in (-1, 3)
]


@pytest.mark.parametrize(
    ("family", "gates"), [*zip(FAMILIES, BORROWING, strict=True), *zip(FAMILIES[::-1], BORROWING, strict=True)], ids=str
)
def test_zero_out_fades_from_the_stock_model_to_zeroed_rows(family, gates, make_stock, make_prompts):
    model, tokens = (
        retrofit(make_stock(family), CompressionConfig(decision_offset=CLOSED, **gates)),
        make_prompts(20)[0],
    )
    rows, stock = [*model.neuron_rows()], make_stock(family)
    for parameter, part in rows:
        parameter.data[part] *= 5
    stock.load_state_dict({name: value for name, value in model.state_dict().items() if "gate_adapter" not in name})
    expected = parallel_log_probs(stock, tokens)
    model.train()
    faded = {
        multiplier: parallel_log_probs(model, tokens, gate_mode=GateMode(neuron_multiplier=multiplier))
        for multiplier in (1.0, 0.5, 0.0)
    }
    assert difference(faded[1.0], expected) < TOLERANCE
    assert difference(faded[0.5], expected) > 10 * TOLERANCE
    for parameter, part in rows:
        assert parameter.data[part].any()
        parameter.data[part] = 0.0
    for mode in (GateMode(neuron_multiplier=0.0), GateMode()):
        got = parallel_log_probs(model, tokens, gate_mode=mode)
        assert difference(got, faded[0.0]) < TOLERANCE / 10, mode


@pytest.mark.parametrize("family", FAMILIES)
def test_a_borrowed_key_neuron_behind_a_norm_is_warned_of_with_its_cost(family, make_stock):
    stock = make_stock(family)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        retrofit(stock, CompressionConfig(decision_offset=2.0))
        for gates in ({"gate_input": "hidden"}, BORROWING[2], FIXED[0]):
            retrofit(make_stock(family), CompressionConfig(**gates))
    messages = [str(warning.message) for warning in caught if "normalizes its keys" in str(warning.message)]
    assert len(messages) == (family == "qwen3")
    for message in messages:  # (2 / 1)^2 of 16 channels whose squares have the mean 1
        assert "loses 25% of its key's squared norm" in message


@pytest.mark.parametrize("family", FAMILIES)
def test_same_parameters_as_the_stock_model(family, make_stock):
    stock = make_stock(family, tie_word_embeddings=family == "qwen2")
    before = {
        name: (tuple(parameter.shape), parameter.dtype, parameter.data_ptr())
        for name, parameter in stock.named_parameters()
    }
    model = retrofit(stock, CompressionConfig())
    after = {
        name: (tuple(parameter.shape), parameter.dtype, parameter.data_ptr())
        for name, parameter in model.named_parameters()
    }
    assert after == before
    assert list(model.state_dict()) == list(stock.state_dict())
    assert all(parameter.requires_grad for parameter in model.parameters())
    if family == "qwen2":
        assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("family", FAMILIES)
def test_without_the_neurons_rows_every_decision_logit_is_minus_the_offset(family, make_compressed, make_prompts):
    model, trace = make_compressed(family, gates={"neuron_index": 5, "decision_offset": 5.0}), GateTrace()
    before = copy.deepcopy(model.state_dict())
    for parameter, rows in model.neuron_rows():
        parameter.data[rows] = 0
    parallel_log_probs(model, make_prompts(9)[0], gate_trace=trace)
    assert all((logits == -5).all() for logits in trace.logits.values())
    for name, after in model.state_dict().items():
        expected = before[name].clone()
        if ".q_proj." in name or ".k_proj." in name:
            expected[5::16] = 0
        assert torch.equal(after, expected), name


@pytest.mark.parametrize(("family", "tied"), zip(FAMILIES, (False, True, True, False), strict=True))
def test_round_trip_through_a_folder(family, tied, make_compressed, make_prompts, tmp_path):
    gates = {"action": "drop", "delay": 3, "decision_offset": 0.25, "target_ratio": 6.0}
    model, tokens = make_compressed(family, gates=gates, tie_word_embeddings=tied), make_prompts(25)[0]
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["model_type"] == f"dmc_{family}"
    assert stored["architectures"] == [type(model).__name__]
    assert CompressionConfig.from_dict(stored["compression"]) == model.compression
    for load in (AutoModelForCausalLM.from_pretrained, load_model, type(model).from_pretrained):
        loaded = load(tmp_path)
        assert type(loaded) is type(model)
        assert not loaded.training
        assert loaded.compression == model.compression
        assert {**loaded.config.to_dict(), "_name_or_path": ""} == model.config.to_dict()
        torch.testing.assert_close(
            parallel_log_probs(loaded, tokens), parallel_log_probs(model, tokens), rtol=0, atol=0
        )


def test_round_trip_of_sixteen_bit_weights(make_stock, make_gates, make_prompts, tmp_path):
    make_stock().save_pretrained(tmp_path / "stock")
    model = retrofit(load_model(tmp_path / "stock", dtype=torch.bfloat16), make_gates())
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    tokens = make_prompts(25)[0]
    torch.testing.assert_close(parallel_log_probs(loaded, tokens), parallel_log_probs(model, tokens), rtol=0, atol=0)
    assert load_model(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_retrofit_of_a_compressed_model_changes_its_gates_only(make_stock, make_gates, make_prompts):
    stock, tokens = make_stock(), make_prompts(30)[0]
    first, second = make_gates(), make_gates(action="drop", delay=2, neuron_index=4)
    run = ModelOracle(stock, second).run(tokens)
    model = retrofit(stock, first)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    model = retrofit(model, second)
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    assert model.compression == second
    assert model.config.compression == second.to_dict()
    assert difference(parallel_log_probs(model, tokens), run.log_probs) < TOLERANCE
    assert difference(Engine(model).score([tokens[:3]], [[*tokens[3:], 0]])[0], run.log_probs[2:]) < TOLERANCE


@pytest.mark.parametrize("training", [False, True])
def test_retrofit_keeps_mode_and_generation_settings(training, make_stock):
    stock = make_stock()
    stock.generation_config.max_new_tokens = 77
    model = retrofit(stock.train(training), CompressionConfig())
    assert model.training == training
    assert model.generation_config.max_new_tokens == 77


def test_plain_call_is_the_parallel_form_and_a_cache_is_made_on_request(make_compressed, make_prompts):
    model = make_compressed()
    tokens = torch.tensor(make_prompts(20))
    with torch.no_grad():
        plain = model(tokens)
        assert plain.past_key_values is None
        expected = model(tokens, use_cache=False).logits
        torch.testing.assert_close(plain.logits, expected, rtol=0, atol=0)
        first = model(tokens[:, :12], use_cache=True)
        second = model(tokens[:, 12:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat((first.logits, second.logits), 1), expected, rtol=0, atol=TOLERANCE)


def test_a_foreign_cache_is_refused(make_compressed, make_prompts):
    from transformers import DynamicCache

    with pytest.raises(TypeError, match="DynamicCache cannot hold a compressed cache"):
        make_compressed()(torch.tensor(make_prompts(5)), past_key_values=DynamicCache())


@pytest.mark.parametrize(
    ("build", "gates", "error", "message"),
    [
        (
            lambda _: GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11)),
            *({}, NotImplementedError, r"^the configuration of this gpt2 model has no num_key_value_heads"),
        ),
        (
            lambda make: make("phimoe"),
            *(
                {},
                ValueError,
                "^layer 0 of this phimoe model cannot be retrofitted: the forward of its attention .*not",
            ),
        ),
        (lambda _: torch.nn.Linear(2, 2), {}, ValueError, "Linear cannot be retrofitted"),
        (lambda make: make().model, {}, ValueError, "LlamaModel cannot be retrofitted"),
        (
            lambda make: make("mistral", sliding_window=8),
            {},
            NotImplementedError,
            r"layer 0 of this .*mistral model has a sliding window of 8 tokens",
        ),
        (
            lambda make: make(rope_parameters={"rope_theta": 100.0, "rope_type": "dynamic", "factor": 2.0}),
            *({}, NotImplementedError, "rope_type='dynamic' changes its angles"),
        ),
        (lambda make: make(head_dim=2), {}, ValueError, "head_dim=2 is too small for a borrowed neuron"),
        (lambda make: make(), {"neuron_index": 16}, ValueError, "neuron_index=16 does not exist in heads of 16"),
    ],
)
def test_what_cannot_have_gates_is_refused_by_name(build, gates, error, message, make_stock):
    with pytest.raises(error, match=message):
        retrofit(build(make_stock), CompressionConfig(**gates))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_rope_acts_as_in_the_stock_model(rope, make_stock, make_prompts, without_neuron, tmp_path):
    stock, tokens = make_stock(rope_parameters={"rope_theta": 100.0, **rope}), make_prompts(60)[0]
    model = retrofit(copy.deepcopy(stock), CompressionConfig(decision_offset=CLOSED))
    model.save_pretrained(tmp_path)
    with without_neuron("llama", 15):
        expected = parallel_log_probs(stock, tokens)
    for loaded in (model, load_model(tmp_path)):
        assert difference(parallel_log_probs(loaded, tokens), expected) < TOLERANCE
        assert difference(Engine(loaded).score([tokens[:9]], [[*tokens[9:], 0]])[0], expected[8:]) < TOLERANCE
