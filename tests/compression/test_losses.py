import pytest
import torch

from dmc.compression import compression_loss, head_agreement_loss, held_fraction

# [2 layers, 1 sequence, 2 heads, 4 tokens], mean 0.5, no token 0 merged.
PAPER = torch.tensor([[[[0, 1, 1, 0], [0, 0, 1, 0]]], [[[0, 1, 0, 1], [0, 1, 1, 1]]]], dtype=torch.float32)


@pytest.mark.parametrize(("target_ratio", "loss"), [(2.0, 0.0), (4.0, 0.25), (1.5, 0.0), (1.0, 0.0), (8.0, 0.375)])
def test_loss_is_what_is_held_above_the_target_share(target_ratio, loss):
    assert compression_loss(PAPER, target_ratio).item() == loss


def test_every_layer_and_head_weighs_the_same_in_the_global_prior():
    torch.testing.assert_close(held_fraction(PAPER), torch.tensor([[[0.5, 0.75]], [[0.5, 0.25]]]))
    uneven = torch.zeros(2, 1, 2, 4)
    uneven[0, :, :, 1:] = 1  # one layer holds a quarter, the other everything: mean 5 / 8
    assert compression_loss(uneven, 2.0).item() == pytest.approx(0.125)


def test_hinge_is_taken_for_each_sequence_before_the_batch_mean():
    alpha = torch.zeros(1, 2, 1, 4)
    alpha[:, 0, :, 1:] = 1  # held 1/4 and 1: the mean, 5/8, would hide how far apart they are
    assert compression_loss(alpha, 2.0).item() == pytest.approx(0.25)  # (0 + 1/2) / 2
    assert compression_loss(alpha[:, :1], 2.0).item() == 0


def test_first_token_counts_as_appended_whatever_its_raw_decision():
    alpha = torch.ones(1, 1, 1, 4)
    assert held_fraction(alpha).item() == 0.25
    assert compression_loss(alpha, 8.0).item() == pytest.approx(0.125)


def test_gradient_passes_straight_through_the_rounding():
    alpha = torch.full((2, 1, 2, 4), 0.4, requires_grad=True)
    loss = compression_loss(alpha, 4.0)
    assert loss.item() == pytest.approx(0.75)  # rounded: nothing is merged
    loss.backward()
    expected = torch.full((2, 1, 2, 4), -1 / 16)
    expected[..., 0] = 0
    torch.testing.assert_close(alpha.grad, expected)


def test_soft_loss_counts_relaxed_decisions():
    alpha = torch.full((1, 1, 1, 4), 0.4)
    assert compression_loss(alpha, 4.0, soft=True).item() == pytest.approx(1 - 0.3 - 0.25)


def test_loss_and_gradient_vanish_below_the_target():
    alpha = torch.full((1, 1, 1, 8), 0.9, requires_grad=True)
    loss = compression_loss(alpha, 2.0)
    loss.backward()
    assert loss.item() == 0
    assert not alpha.grad.any()


@pytest.mark.parametrize("delay", [0, 1, 3, 4, 7, 8, 100])
def test_raw_tokens_of_a_delayed_gate_are_counted(delay):
    generator = torch.Generator().manual_seed(0)
    alpha = torch.randint(2, (2, 3, 4, 8), generator=generator).float()
    expected = torch.zeros(2, 3, 4)
    for layer in range(2):
        for row in range(3):
            for head in range(4):
                held = min(8, delay)
                for token in range(8 - delay):
                    held += 1 if token == 0 else 1 - alpha[layer, row, head, token].item()
                expected[layer, row, head] = held / 8
    torch.testing.assert_close(held_fraction(alpha, delay=delay), expected)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("delay", [0, 2])
def test_padding_is_not_counted(side, delay):
    alpha = torch.rand(2, 1, 3, 10, generator=torch.Generator().manual_seed(0))
    padding = torch.ones(2, 1, 3, 5)
    padded = torch.cat((padding, alpha) if side == "left" else (alpha, padding), dim=-1)
    mask = torch.zeros(1, 15, dtype=torch.bool)
    mask[:, slice(5, None) if side == "left" else slice(10)] = True
    torch.testing.assert_close(held_fraction(padded, delay=delay, token_mask=mask), held_fraction(alpha, delay=delay))
    torch.testing.assert_close(
        compression_loss(padded, 4.0, delay=delay, token_mask=mask), compression_loss(alpha, 4.0, delay=delay)
    )


@pytest.mark.parametrize("target_ratio", [0.5, 0, -1])
def test_target_below_one_is_refused(target_ratio):
    with pytest.raises(ValueError, match=f"target_ratio={target_ratio} is not a compression ratio"):
        compression_loss(PAPER, target_ratio)


def test_local_prior_holds_every_layer_to_the_target():
    assert compression_loss(PAPER, 2.0, prior="local").item() == 0.0625  # layers: 1/8 and 0
    assert compression_loss(PAPER, 2.0).item() == 0  # together they meet it
    assert compression_loss(PAPER, 4.0, prior="local").item() == compression_loss(PAPER, 4.0).item() == 0.25


def test_local_prior_counts_each_sequence_and_layer_by_itself():
    alpha = torch.rand(3, 4, 2, 9, generator=torch.Generator().manual_seed(0))
    terms = [
        [max(0.0, held_fraction((alpha[layer : layer + 1, row : row + 1] > 0.5).float()).mean().item() - 0.4)]
        for layer in range(3)
        for row in range(4)
    ]
    loss = compression_loss(alpha, 2.5, prior="local")
    assert loss.item() == pytest.approx(sum(term for (term,) in terms) / 12)


def test_unknown_prior_and_form_are_refused():
    with pytest.raises(ValueError, match="prior='per_head' is unknown: expected 'global' or 'local'"):
        compression_loss(PAPER, 2.0, prior="per_head")
    with pytest.raises(ValueError, match="form='sum' is unknown: expected 'mean' or 'ratio'"):
        head_agreement_loss(PAPER, "sum")


@pytest.mark.parametrize(("form", "loss"), [("mean", 2 / 16), ("ratio", 1 / 8)])
def test_head_agreement_has_the_numbers_of_its_equation(form, loss):
    assert head_agreement_loss(PAPER, form).item() == loss
    twice = PAPER.repeat(1, 3, 1, 1)
    assert head_agreement_loss(twice, form).item() == pytest.approx(loss)


@pytest.mark.parametrize("form", ["mean", "ratio"])
def test_heads_that_agree_cost_nothing(form):
    alpha = torch.tensor([0.0, 1, 1, 1]).expand(1, 1, 4, 4)
    assert head_agreement_loss(alpha, form).item() == 0


def test_equal_ratios_suffice_for_the_ratio_form():
    alpha = torch.tensor([[0.0, 1, 0, 1], [0, 0, 1, 1]])[None, None]
    assert head_agreement_loss(alpha, "ratio").item() == 0
    assert head_agreement_loss(alpha, "mean").item() == 0.25


LOSSES = {
    "global, soft": lambda alpha: compression_loss(alpha, 4.0, soft=True),
    "local, soft": lambda alpha: compression_loss(alpha, 2.0, soft=True, prior="local"),
    "local, delay": lambda alpha: compression_loss(alpha, 4.0, soft=True, prior="local", delay=2),
    "mean": lambda alpha: head_agreement_loss(alpha, "mean"),
    "ratio": lambda alpha: head_agreement_loss(alpha, "ratio"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_finite_differences(name):
    alpha = torch.rand(2, 2, 3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert LOSSES[name](alpha).item() > 0
    torch.autograd.gradcheck(LOSSES[name], alpha.requires_grad_(), atol=1e-7)


def test_straight_through_local_prior_has_the_gradient_of_the_layers_above_the_target():
    alpha = PAPER.clone().requires_grad_()
    compression_loss(alpha, 2.0, prior="local").backward()
    expected = torch.zeros_like(PAPER)
    expected[0, ..., 1:] = -1 / 16  # (1/2) of the layers, (1/8) of the layer's decisions
    torch.testing.assert_close(alpha.grad, expected)
