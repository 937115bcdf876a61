import math

import pytest
import torch

from dmc.compression import hard_decisions, sample_decisions, straight_through
from dmc.compression.relaxation import DecisionNoise, decision_seed, log_one_minus_sigmoid, logistic_noise
from dmc.ranks import Ranks


@pytest.mark.parametrize("temperature", [0.05, 0.1, 1.0])
@pytest.mark.parametrize("logit", [-5.0, -1.0, 0.0, 2.0])
def test_a_decision_is_one_with_the_sigmoid_of_its_logit_at_every_temperature(logit, temperature):
    count = 400_000
    generator = torch.Generator().manual_seed(0)
    alpha, _ = sample_decisions(torch.full((1, 1, count), logit), temperature, generator)
    probability = 1 / (1 + math.exp(-logit))
    deviation = math.sqrt(probability * (1 - probability) / count)
    assert (alpha > 0.5).double().mean().item() == pytest.approx(probability, abs=4 * deviation)


def test_noise_is_logistic():
    noise = logistic_noise(torch.rand(400_000, generator=torch.Generator().manual_seed(0))).double()
    assert noise.mean().item() == pytest.approx(0, abs=0.015)
    assert noise.var().item() == pytest.approx(math.pi**2 / 3, rel=0.01)
    assert noise.isfinite().all()


def test_noised_logit_and_relaxed_decision_belong_together():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    alpha, noised = sample_decisions(logits, 0.1, torch.Generator().manual_seed(1))
    noise = logistic_noise(torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)))
    assert alpha.dtype == noised.dtype == torch.float32
    torch.testing.assert_close(noised, (logits + noise) / 0.1)
    torch.testing.assert_close(alpha, torch.sigmoid(noised))


def test_sixteen_bit_logits_get_the_noise_of_float32():
    logits = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    alpha, noised = sample_decisions(logits, 0.1, torch.Generator().manual_seed(1))
    expected = sample_decisions(logits.float(), 0.1, torch.Generator().manual_seed(1))
    assert alpha.dtype == torch.float32
    torch.testing.assert_close((alpha, noised), expected, rtol=0, atol=0)


def noise_of_one(seed, layer, heads=4, length=50):
    """Naive: as one sequence of one layer draws it by itself, operation by operation."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + layer) % 2**63)
    uniform = torch.rand(heads, length, generator=generator).clamp(2.0**-25, 1 - 2.0**-24)
    return torch.log(uniform) - torch.log1p(-uniform)


def test_noise_belongs_to_sample_and_layer_whatever_the_batch_the_pass_and_the_ranks():
    noise = DecisionNoise([7, 8, 2**40], [0, 2, 5], 4, 50, torch.device("cpu"))
    for layer in (0, 2, 5):
        expected = torch.stack([noise_of_one(seed, layer) for seed in (7, 8, 2**40)])
        assert torch.equal(noise.of_layer(layer), expected)
        part = DecisionNoise([8], [layer], 4, 50, torch.device("cpu"), Ranks(1, 2)).of_layer(layer)
        assert torch.equal(part[0], expected[1, 2:])
    assert len({float(value) for value in noise.of_layer(0)[:, :, 0].flatten()}) == 12  # heads draw their own


def test_seeds_of_neighbouring_samples_and_layers_never_meet():
    assert len({decision_seed(seed, layer) for seed in range(100) for layer in range(100)}) == 100 * 100


@pytest.mark.parametrize("seed", [0, 2**40, 2**62, 2**63 - 1])
def test_any_seed_below_two_to_the_63_serves(seed):
    DecisionNoise([seed], [31], 1, 1, torch.device("cpu"))


def test_straight_through_has_hard_values_and_the_relaxed_gradient():
    alpha = torch.rand(1000, generator=torch.Generator().manual_seed(0), requires_grad=True)
    hard = straight_through(alpha)
    torch.testing.assert_close(hard, (alpha > 0.5).float(), rtol=0, atol=0)
    probe = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    (hard * probe).sum().backward()
    torch.testing.assert_close(alpha.grad, probe, rtol=0, atol=0)


def test_ties_are_appended():
    assert hard_decisions(torch.tensor([-1e-6, 0.0, 1e-6])).tolist() == [False, False, True]
    assert straight_through(torch.tensor([0.5])).item() == 0


def test_threshold_agrees_with_the_noiseless_relaxed_decision():
    logits = torch.linspace(-3, 3, 61)
    assert torch.equal(hard_decisions(logits), torch.sigmoid(logits / 0.1) > 0.5)


def test_log_of_one_minus_alpha_keeps_its_digits_where_alpha_rounds_to_one():
    noised = torch.tensor([-80.0, 0.0, 30.0, 200.0], requires_grad=True)
    result = log_one_minus_sigmoid(noised)
    torch.testing.assert_close(result, torch.tensor([0.0, -math.log(2), -30.0, -200.0]))
    result.sum().backward()
    torch.testing.assert_close(noised.grad, -torch.sigmoid(noised.detach()))
