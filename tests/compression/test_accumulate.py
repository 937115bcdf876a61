import pytest
import torch
from covering import cover
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dmc.compression import accumulate

WINDOWS = [1, 3, 12, None]


def naive(key_value, alpha, omega, window_size):
    time = key_value.shape[2]
    product, weighted, total = torch.ones_like(alpha), omega.unsqueeze(-1) * key_value, omega
    for j in range(1, min(time, window_size or time)):
        product = product[..., 1:] * alpha[..., 1 : time - j + 1]  # C(t, j) for t = j, j + 1, ...
        weight = product * omega[..., :-j]
        weighted = weighted + functional.pad(weight.unsqueeze(-1) * key_value[:, :, :-j], (0, 0, j, 0))
        total = total + functional.pad(weight, (j, 0))
    return weighted / total.unsqueeze(-1)


def draw(time, hard=False, dtype=torch.float64, channels=3):
    generator = torch.Generator().manual_seed(time)
    key_value = torch.randn(2, 2, time, channels, generator=generator, dtype=dtype)
    alpha = torch.rand(2, 2, time, generator=generator, dtype=dtype)
    alpha = (alpha < 0.8).to(dtype) if hard else alpha
    omega = 0.1 + torch.rand(2, 2, time, generator=generator, dtype=dtype)
    return key_value.requires_grad_(), alpha.requires_grad_(), omega.requires_grad_()


def sequence(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)[None, None]


@pytest.mark.parametrize(
    ("values", "alpha", "omega", "window_size", "expected"),
    [
        ((4, 0, 2, 6, 1), (0, 1, 0, 1, 0), (1, 1, 0.5, 0.5, 1), None, (4, 2, 2, 4, 1)),
        ((4, 0, 2, 6, 1), (0, 0.5, 0.5, 0, 1), (1, 1, 0.5, 0.5, 1), None, (4, 4 / 3, 1.6, 6, 8 / 3)),
        ((4, 0, 2, 6, 1), (0, 0.5, 0.5, 0, 1), (1, 1, 0.5, 0.5, 1), 2, (4, 4 / 3, 1, 6, 8 / 3)),
        ((1, 2, 3, 4, 5), (0, 1, 1, 1, 1), (1, 1, 1, 1, 1), None, (1, 1.5, 2, 2.5, 3)),
        ((1, 2, 3, 4, 5), (0, 1, 1, 1, 1), (1, 1, 1, 1, 1), 3, (1, 1.5, 2, 3, 4)),
        ((1, 2, 3, 4), (0, 1, 0, 1), (1, 1, 1, 1), None, (1, 1.5, 3, 3.5)),
    ],
)
def test_worked_examples_are_exact(values, alpha, omega, window_size, expected):
    out = accumulate(sequence(*values).unsqueeze(-1), sequence(*alpha), sequence(*omega), window_size)
    torch.testing.assert_close(out[0, 0, :, 0], torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("time", "window_size", "hard"), cover((1, 2, 65, 200), (*WINDOWS, 33), (False, True)), ids=str
)
def test_values_and_gradients_are_those_of_the_definition(time, window_size, hard):
    leaves = draw(time, hard)
    out = accumulate(*leaves, window_size)
    expected = naive(*leaves, window_size)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    found = torch.autograd.grad(out, leaves, probe)
    wanted = torch.autograd.grad(expected, leaves, probe, materialize_grads=True)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def test_the_recurrence_over_thousands_of_tokens_is_the_plain_loop():
    key_value, alpha, omega = (leaf.detach() for leaf in draw(2500, channels=2))
    alpha[..., ::7] = 1
    weighted, total, rows = torch.zeros_like(key_value[:, :, 0]), torch.zeros_like(omega[..., 0]), []
    for t in range(2500):
        decay = alpha[..., t] if t else torch.zeros_like(total)
        total = decay * total + omega[..., t]
        weighted = decay.unsqueeze(-1) * weighted + omega[..., t, None] * key_value[:, :, t]
        rows.append(weighted / total.unsqueeze(-1))
    torch.testing.assert_close(accumulate(key_value, alpha, omega, None), torch.stack(rows, 2), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("window_size", WINDOWS)
def test_the_first_decision_is_read_as_zero_and_gets_no_gradient(window_size):
    key_value, alpha, omega = draw(20)
    out = accumulate(key_value, alpha, omega, window_size)
    forced = torch.cat([torch.ones_like(alpha[..., :1]), alpha[..., 1:]], dim=-1).detach()
    assert torch.equal(out, accumulate(key_value, forced, omega, window_size))
    (gradient,) = torch.autograd.grad(out.square().sum(), alpha)
    assert not gradient[..., 0].any()
    assert gradient[..., 1:].any() == (window_size != 1)


@pytest.mark.parametrize("window_size", [12, None])
def test_no_sequence_sees_another(window_size):
    key_value, alpha, omega = (leaf.detach().clone() for leaf in draw(65))
    alone = accumulate(key_value[1:], alpha[1:], omega[1:], window_size)
    key_value[0] = torch.nan
    torch.testing.assert_close(accumulate(key_value, alpha, omega, window_size)[1:], alone)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("window_size", [12, None])
def test_sixteen_bit_input_is_accumulated_in_float32(window_size, autocast):
    leaves = [leaf.detach().bfloat16().requires_grad_() for leaf in draw(100)]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = accumulate(*leaves, window_size)
    assert out.dtype == torch.float32
    exact = accumulate(*[leaf.double() for leaf in leaves], window_size)
    torch.testing.assert_close(out.double(), exact, rtol=2e-6, atol=2e-6)
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert all(gradient.dtype == torch.bfloat16 and gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("window_size", [12, None])
def test_strided_input_gives_the_same(window_size):
    key_value, alpha, omega = (leaf.detach() for leaf in draw(40))
    strided = [leaf.transpose(1, 2).contiguous().transpose(1, 2) for leaf in (key_value, alpha, omega)]
    torch.testing.assert_close(
        accumulate(*strided, window_size), accumulate(key_value, alpha, omega, window_size), rtol=0, atol=0
    )


@pytest.mark.parametrize("window_size", [3, None])
def test_recomputation_under_checkpointing_gives_the_same_gradients(window_size):
    leaves = draw(50)
    plain = torch.autograd.grad(accumulate(*leaves, window_size).square().sum(), leaves)
    out = checkpoint(lambda *inputs: accumulate(*inputs, window_size).square(), *leaves, use_reentrant=False)
    for got, want in zip(torch.autograd.grad(out.sum(), leaves), plain, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


class _Sizes(TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().size():
                self.largest = max(self.largest, tensor.untyped_storage().size() // tensor.element_size())
        return out


@pytest.mark.parametrize("window_size", [12, None])
def test_no_step_holds_a_window_of_values_per_token(window_size):
    key_value, alpha, omega = leaves = [leaf.float().detach().requires_grad_() for leaf in draw(1000, channels=64)]
    with _Sizes() as sizes:
        accumulate(key_value, alpha, omega, window_size).sum().backward()
    assert sizes.largest < 1.1 * leaves[0].numel()


@pytest.mark.parametrize("window_size", [0, -1])
def test_a_window_below_one_token_is_refused(window_size):
    with pytest.raises(ValueError, match=rf"window_size={window_size} is not supported .* use window_size >= 1"):
        accumulate(*draw(5), window_size)


def test_shapes_that_do_not_belong_together_are_refused():
    key_value, alpha, omega = draw(5)
    for wrong in [
        (key_value[:, :, :, 0], alpha, omega),
        (key_value, alpha[:, :1], omega),
        (key_value, alpha, omega[0]),
    ]:
        with pytest.raises(ValueError, match=r"accumulate got key_value .* expected"):
            accumulate(*wrong, 3)
