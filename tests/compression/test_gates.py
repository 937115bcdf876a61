import dataclasses
import math

import pytest
import torch

from dmc.compression import CompressionConfig, Compressor, GateMode, GateOutput, GateTrace

BATCH, GROUP, KV_HEADS, TIME, HEAD_DIM = 2, 2, 3, 9, 8


def states(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(BATCH, heads, TIME, HEAD_DIM) for heads in (GROUP * KV_HEADS, KV_HEADS, KV_HEADS)]
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value


def compressor(**settings):
    return Compressor(CompressionConfig(**{"decision_offset": 0.0, **settings}), HEAD_DIM)


@pytest.mark.parametrize("neuron", [-1, 0, 3])
def test_thresholded_gate_reads_the_neuron_and_removes_it(neuron):
    query, key, _ = states()
    gated = compressor(neuron_index=neuron, decision_offset=0.3, omega_offset=0.7, eps=0.01).gate(
        query, key, GateMode(), 0
    )
    for row in range(BATCH):
        for head in range(KV_HEADS):
            for token in range(TIME):
                logit = key[row, head, token, neuron].item() - 0.3
                importance = sum(query[row, head * GROUP + i, token, neuron].item() for i in range(GROUP)) / GROUP
                assert gated.logits[row, head, token].item() == pytest.approx(logit, abs=1e-6)
                assert gated.alpha[row, head, token].item() == (logit > 0)
                assert gated.log_append[row, head, token].item() == (-math.inf if logit > 0 else 0)
                omega = 1 / (1 + math.exp(-importance - 0.7)) + 0.01
                assert gated.omega[row, head, token].item() == pytest.approx(omega, abs=1e-6)
    for before, after in ((query, gated.query), (key, gated.key)):
        expected = before.clone()
        expected[..., neuron] = 0
        torch.testing.assert_close(after, expected, rtol=0, atol=0)


def test_initial_offset_opens_one_gate_in_150():
    key = torch.zeros(1, 1, 400_000, HEAD_DIM)
    gated = Compressor(CompressionConfig(), HEAD_DIM).gate(key, key, GateMode(noise_seeds=[1]), 0)
    assert (gated.alpha > 0.5).float().mean().item() == pytest.approx(0.006693, rel=0.1)
    assert gated.omega.unique().numel() == 1


@pytest.mark.parametrize("mode", [GateMode(), GateMode(noise_seeds=[4, 9])])
def test_a_layer_that_decides_as_one_takes_the_means_of_its_heads(mode):
    query, key, _ = states()
    per_head = compressor(decision_offset=0.2, omega_offset=0.7).gate(query, key, mode, 0)
    gated = compressor(decisions="per_layer", decision_offset=0.2, omega_offset=0.7).gate(query, key, mode, 0)
    torch.testing.assert_close(gated.logits, per_head.logits.mean(1, keepdim=True).expand_as(per_head.logits))
    expected = torch.sigmoid(query[..., -1].mean(1, keepdim=True) + 0.7) + 2**-7
    torch.testing.assert_close(gated.omega, expected.expand_as(gated.omega))
    assert torch.equal(gated.key, per_head.key)
    assert torch.equal(gated.query, per_head.query)
    for one in (gated.alpha, gated.log_append):
        assert one.shape == key.shape[:3]
        assert (one == one[:, :1]).all()
    if mode.noise_seeds is None:
        assert torch.equal(gated.alpha, (gated.logits > 0).float())


@pytest.mark.parametrize("decisions", ["per_head", "per_layer"])
def test_uniform_weights_are_one_and_change_no_decision(decisions):
    query, key, value = states()
    learned = compressor(decisions=decisions).gate(query, key, GateMode(), 0)
    gate = compressor(decisions=decisions, weighting="uniform", window_size=None)
    gated = gate.gate(query, key, GateMode(), 0)
    assert (gated.omega == 1).all()
    assert torch.equal(gated.alpha, learned.alpha)
    assert torch.equal(gated.query, learned.query)
    expected = Compressor(gate.config, HEAD_DIM).pool(dataclasses.replace(learned, omega=7 * gated.omega), value)
    torch.testing.assert_close(gate.pool(gated, value), expected)  # a common factor of all weights cancels


def test_starts_are_always_appended():
    query, key, _ = states()
    starts = torch.zeros(BATCH, TIME, dtype=torch.bool)
    starts[:, 0] = starts[1, 4] = True
    for mode in (GateMode(), GateMode(noise_seeds=[1, 2])):
        gated = compressor(decision_offset=-10.0).gate(query, key, mode, 0, starts)
        appended = starts[:, None].expand(-1, KV_HEADS, -1)
        assert not gated.alpha[appended].any()
        assert not gated.log_append[appended].any()
        assert (gated.alpha[~appended] > 0.5).all()


def test_relaxed_gate_keeps_the_bias_of_the_noised_logit():
    query, key, _ = states()
    gated = compressor().gate(query, key, GateMode(noise_seeds=[1, 2]), 0)
    assert ((gated.alpha > 0) & (gated.alpha < 1)).any()
    assert gated.log_append.isfinite().all()
    torch.testing.assert_close(gated.log_append.exp(), 1 - gated.alpha, rtol=1e-4, atol=1e-6)


def test_a_gate_without_noise_is_a_sigmoid_of_its_logits():
    query, key, _ = states()
    gate = compressor(noise=False, temperature=2.0).gate
    first, again = gate(query, key, GateMode(noise_seeds=[1, 2]), 0), gate(query, key, None, 0)
    torch.testing.assert_close(first.alpha, 1 / (1 + (-first.logits / 2.0).exp()))
    torch.testing.assert_close(first.log_append.exp(), 1 - first.alpha, rtol=1e-4, atol=1e-6)
    assert torch.equal(first.alpha, again.alpha)


def test_noise_follows_the_sample_and_the_layer():
    query, key, _ = states()
    query, key = query[:1].expand(2, -1, -1, -1), key[:1].expand(2, -1, -1, -1)
    gate = compressor().gate
    both = gate(query, key, GateMode(noise_seeds=[5, 6]), 3).alpha
    torch.testing.assert_close(gate(query[:1], key[:1], GateMode(noise_seeds=[6]), 3).alpha[0], both[1], rtol=0, atol=0)
    assert not torch.equal(both[0], both[1])
    assert not torch.equal(gate(query, key, GateMode(noise_seeds=[5, 6]), 4).alpha, both)


def test_without_a_mode_noise_comes_from_the_default_generator():
    query, key, _ = states()
    gate = compressor().gate
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first = gate(query, key, None, 0).alpha
        second = gate(query, key, None, 0).alpha
        torch.manual_seed(3)
        again = gate(query, key, None, 0).alpha
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_order_of_query_heads_inside_a_group_does_not_matter():
    query, key, value = states()
    swapped = query.unflatten(1, (KV_HEADS, GROUP)).flip(2).flatten(1, 2)
    gate = compressor()
    gated, again = gate.gate(query, key, GateMode(), 0), gate.gate(swapped, key, GateMode(), 0)
    torch.testing.assert_close(again.alpha, gated.alpha)
    torch.testing.assert_close(again.omega, gated.omega)
    torch.testing.assert_close(gate.pool(again, value), gate.pool(gated, value))


def hand_written(alpha, key):
    """One head whose key channels 0..3 hold `key`; borrowed neuron apart."""
    alpha_row = torch.tensor(alpha, dtype=torch.float32)[None, None]
    keys = torch.tensor(key, dtype=torch.float32)[None, None, :, None].expand(-1, -1, -1, 4)
    return GateOutput(keys, keys, alpha_row, alpha_row, torch.log1p(-alpha_row), torch.ones_like(alpha_row))


def test_merge_gate_shows_running_averages_until_the_next_token_merges():
    gate = Compressor(CompressionConfig(), 4)
    gated = hand_written([0, 1, 0, 1], [1, 2, 3, 4])
    key, value = gate.pool(gated, gated.key)
    assert key[0, 0, :, 0].tolist() == value[0, 0, :, 0].tolist() == [1, 1.5, 3, 3.5]
    assert gate.log_keep(gated)[0, 0].tolist() == [-math.inf, 0, -math.inf, 0]


def test_drop_gate_pools_nothing_and_hides_its_own_token():
    gate = Compressor(CompressionConfig(action="drop", delay=2), 4)
    gated = hand_written([0, 1, 0, 1], [1, 2, 3, 4])
    key, value = gate.pool(gated, gated.key)
    assert key is gated.key
    assert value is gated.key
    assert gate.log_keep(gated)[0, 0].tolist() == [0, -math.inf, 0, -math.inf]


def test_pooled_states_keep_the_dtype_of_the_values():
    query, key, value = (tensor.bfloat16() for tensor in states())
    gate = compressor()
    gated = gate.gate(query, key, GateMode(), 0)
    assert {pooled.dtype for pooled in gate.pool(gated, value)} == {torch.bfloat16}
    assert gated.alpha.dtype == gated.omega.dtype == gated.logits.dtype == torch.float32


def test_heads_without_a_neuron_to_lend_are_refused():
    with pytest.raises(ValueError, match="head_dim=2 is too small for a borrowed neuron"):
        Compressor(CompressionConfig(), 2)
    for neuron in (8, -9):
        with pytest.raises(ValueError, match=f"neuron_index={neuron} does not exist in heads of 8 channels"):
            Compressor(CompressionConfig(neuron_index=neuron), 8)


def test_trace_is_assigned_by_layer_so_that_recomputation_counts_once():
    query, key, _ = states()
    trace = GateTrace()
    for layer in (1, 0, 1):
        trace.record(layer, compressor().gate(query, key, GateMode(), layer))
    assert trace.stacked_alpha().shape == (2, BATCH, KV_HEADS, TIME)
    assert sorted(trace.alpha) == sorted(trace.logits) == [0, 1]


def test_a_gate_takes_the_noise_of_its_pass_and_draws_its_own_by_the_same_seeds_without():
    query, key, _ = states()
    gate, mode = compressor(), GateMode(noise_seeds=[5, 6])
    drawn = gate.with_noise(mode, [1, 3], KV_HEADS, key.shape[2], key.device)
    for layer in (1, 3):
        assert torch.equal(gate.gate(query, key, drawn, layer).alpha, gate.gate(query, key, mode, layer).alpha)
    assert gate.with_noise(drawn, [0], 1, 1, key.device) is drawn
