import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dmc.models import masked_attention as module
from dmc.models.masked_attention import (
    delayed_masked_attention,
    flash,
    flash_ops,
    masked_attention,
)

SCALING = 0.3
NAMES = ("query", "recent_key", "recent_value", "stream_key", "stream_value", "log_keep")
FORMS = [(0, True), *[(delay, keep_top) for delay in (1, 4, 16, 64, 300) for keep_top in (True, False)]]


@pytest.fixture(params=["blocked", "flash", "flash padded to 8"])
def implementation(request, monkeypatch):
    """Choose what computes: the matrix products, the CPU's flash kernel, or that with the widths a GPU wants."""
    monkeypatch.setattr(module, "_SHORT", 10_000 if request.param == "blocked" else 0)
    monkeypatch.setattr(module, "_WIDE", 10_000)
    if request.param == "flash padded to 8":

        def find(query):
            kernel = flash_ops.find_flash_kernel(query)
            assert kernel is not None
            return dataclasses.replace(kernel, multiple=8)

        monkeypatch.setattr(flash, "find_flash_kernel", find)
    return request.param


def draw(time, *, heads=4, kv_heads=2, channels=6, free_channel=None, batch=2):
    generator = torch.Generator().manual_seed(time)

    def normal(heads, is_key):
        states = torch.randn(batch, time, heads, channels, generator=generator, dtype=torch.float64).transpose(1, 2)
        if is_key and free_channel is not None:
            states[..., free_channel] = 0
        return states

    states = [normal(heads, True), *[normal(kv_heads, is_key) for is_key in (True, False, True, False)]]
    log_keep = functional.logsigmoid(2 * torch.randn(batch, kv_heads, time, generator=generator, dtype=torch.float64))
    return [tensor.requires_grad_() for tensor in (*states, log_keep)]


def naive(tensors, delay, keep_top, hidden=None):
    """Attend row by row; a row that sees nothing is 0."""
    query, recent_key, recent_value, stream_key, stream_value, log_keep = tensors
    group = query.shape[1] // recent_key.shape[1]
    rows = []
    for i in range(query.shape[2]):
        old = max(0, i - delay + 1)  # the stream is what came before
        keys = torch.cat([stream_key[:, :, :old], recent_key[:, :, old : i + 1]], dim=2)
        values = torch.cat([stream_value[:, :, :old], recent_value[:, :, old : i + 1]], dim=2)
        bias = torch.zeros_like(keys[..., 0])
        biased = old - 1 if keep_top and old else old
        bias[..., :biased] = log_keep[..., :biased]
        if hidden is not None:
            bias = bias.masked_fill(hidden[:, None, : i + 1], -math.inf)
        bias = bias.repeat_interleave(group, 1)
        scores = SCALING * torch.einsum("bhd,bhjd->bhj", query[:, :, i], keys.repeat_interleave(group, 1)) + bias
        blind = (scores == -math.inf).all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(blind, 0), dim=-1).masked_fill(blind, 0)
        rows.append(torch.einsum("bhj,bhjd->bhd", weights, values.repeat_interleave(group, 1)))
    return torch.stack(rows, dim=2)


def attend(tensors, delay, keep_top, **options):
    if delay == 0:
        query, _, _, key, value, log_keep = tensors
        return masked_attention(query, key, value, log_keep, SCALING, **options)
    return delayed_masked_attention(*tensors, SCALING, delay=delay, keep_top=keep_top, **options)


def compare(tensors, out, expected, *, tolerance=1e-10, without=None):
    """Compare values and gradients; the free channel of query and keys (`without`) gets no gradient."""
    assert out.shape == expected.shape
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    found = torch.autograd.grad(out, tensors, probe, materialize_grads=True)
    wanted = torch.autograd.grad(expected, tensors, probe, materialize_grads=True)
    for name, got, want in zip(NAMES, found, wanted, strict=True):
        if without is not None and name in ("query", "recent_key", "stream_key"):
            assert not got[..., without].any(), name
            want[..., without] = 0
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("free_channel", [None, 5, -3])
@pytest.mark.parametrize(("delay", "keep_top"), FORMS)
@pytest.mark.parametrize("time", [1, 2, 5, 65])
def test_values_and_gradients_are_those_of_the_definition(implementation, time, delay, keep_top, free_channel):
    tensors = draw(time, free_channel=free_channel)
    out = attend(tensors, delay, keep_top, free_channel=free_channel)
    compare(tensors, out, naive(tensors, delay, keep_top), without=free_channel)


@pytest.mark.parametrize(("delay", "keep_top"), [(0, True), (16, True), (16, False), (100, True)])
@pytest.mark.parametrize("time", [64, 200])
def test_long_sequences_cross_blocks(implementation, time, delay, keep_top):
    tensors = draw(time, free_channel=5)
    out = attend(tensors, delay, keep_top, free_channel=5)
    compare(tensors, out, naive(tensors, delay, keep_top), without=5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (4, 1), (6, 2)])
@pytest.mark.parametrize(("delay", "keep_top"), [(0, True), (4, True), (4, False)])
def test_query_heads_share_the_kv_head_of_their_group(implementation, heads, kv_heads, delay, keep_top):
    tensors = draw(33, heads=heads, kv_heads=kv_heads)
    compare(tensors, attend(tensors, delay, keep_top), naive(tensors, delay, keep_top))


@pytest.mark.parametrize(("delay", "keep_top"), [(0, True), (1, False), (4, True), (16, False), (300, True)])
def test_hidden_padding_is_seen_by_nobody(implementation, delay, keep_top):
    tensors = draw(40)
    hidden = torch.zeros(2, 40, dtype=torch.bool)
    hidden[0, :23] = True  # left padding: the first rows see nothing
    hidden[1, 30:] = True
    out = attend(tensors, delay, keep_top, hidden=hidden)
    compare(tensors, out, naive(tensors, delay, keep_top, hidden))
    assert not out[0, :, :23].any()
    shorter = [tensor[:1, ..., 23:, :] if tensor.dim() == 4 else tensor[:1, :, 23:] for tensor in tensors]
    torch.testing.assert_close(out[:1, :, 23:], attend(shorter, delay, keep_top))


@pytest.mark.parametrize(("delay", "keep_top"), [(0, True), (1, False), (4, True), (16, False)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_keys_at_minus_infinity_vanish_and_leave_finite_gradients(implementation, dtype, delay, keep_top):
    tensors = draw(50)
    with torch.no_grad():
        tensors[-1][..., ::3] = -math.inf
        tensors[-1][..., 1::3] = 0
    tensors = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
    out = attend(tensors, delay, keep_top)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    expected = naive([tensor.double() for tensor in tensors], delay, keep_top)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    gradients = torch.autograd.grad(out.square().sum(), tensors, materialize_grads=True)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[-1][..., ::3].any()


def test_no_delay_is_masked_attention(implementation):
    tensors = draw(40)
    merged = delayed_masked_attention(*tensors, SCALING, delay=0, keep_top=True)
    torch.testing.assert_close(merged, attend(tensors, 0, True), rtol=0, atol=0)


@pytest.mark.parametrize(("delay", "keep_top"), [(0, True), (16, True), (16, False)])
@pytest.mark.parametrize("autocast", [False, True])
def test_sixteen_bit_is_as_near_as_its_rounding(implementation, autocast, delay, keep_top):
    exact = draw(200, channels=16, free_channel=3)
    tensors = [tensor.detach().bfloat16().requires_grad_() for tensor in exact[:-1]]
    tensors.append(exact[-1].detach().float().requires_grad_())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = attend(tensors, delay, keep_top, free_channel=3)
    assert out.dtype == torch.bfloat16
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = naive(exact, delay, keep_top)
    assert (out - expected).norm() < 1e-2 * expected.norm()
    found = torch.autograd.grad(out.float().square().sum(), tensors, materialize_grads=True)
    wanted = torch.autograd.grad(expected.square().sum(), exact, materialize_grads=True)
    for name, got, want in zip(NAMES, found, wanted, strict=True):
        want = want.clone()
        if name in ("query", "recent_key", "stream_key"):
            want[..., 3] = 0
        assert (got - want).norm() <= 3e-2 * want.norm(), name


class _LargestOutput(TorchDispatchMode):
    """Remember the most elements that any operation's result held in memory."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().size() // tensor.element_size())
        return out


@pytest.mark.parametrize(("delay", "keep_top"), [(0, True), (16, True), (16, False), (3000, True)])
def test_no_tensor_is_time_by_time(implementation, delay, keep_top):
    time = 2048
    tensors = [tensor.detach().float().requires_grad_() for tensor in draw(time, channels=8, free_channel=3, batch=1)]
    with _LargestOutput() as largest:
        attend(tensors, delay, keep_top, free_channel=3).sum().backward()
    assert largest.elements < time * time / 4  # of one head


@pytest.mark.parametrize(("delay", "keep_top"), [(0, True), (4, True), (4, False)])
def test_recomputation_under_checkpointing_gives_the_same_gradients(implementation, delay, keep_top):
    tensors = draw(40)
    used = tensors if delay else [tensors[0], *tensors[3:]]

    def loss(*inputs):
        inputs = inputs if delay else (inputs[0], None, None, *inputs[1:])
        return attend(list(inputs), delay, keep_top).square().sum()

    plain = torch.autograd.grad(loss(*used), used)
    recomputed = torch.autograd.grad(checkpoint(loss, *used, use_reentrant=False), used)
    for got, want in zip(recomputed, plain, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_short_and_long_sequences_take_their_own_path(monkeypatch):
    taken = []

    def record(name):
        return lambda form, query, *rest: taken.append(name) or query

    monkeypatch.setattr(module.BlockedAttention, "apply", record("blocked"))
    monkeypatch.setattr(module.FlashAttention, "apply", record("flash"))
    for time, delay in [(64, 0), (2048, 0), (2048, 16), (2048, 500)]:
        tensors = draw(time, batch=1, channels=2)
        attend(tensors, delay, True)
    assert taken == ["blocked", "flash", "flash", "blocked"]


@pytest.mark.parametrize("time", [33, 64])
@pytest.mark.parametrize(("kernel", "dtype"), [("cuda", torch.bfloat16), ("efficient", torch.float32)])
def test_the_gpu_kernels_take_these_operands(kernel, dtype, time):
    """No GPU here: the operators' own shape functions check arguments and layouts."""
    query = torch.empty(4, time, 2, 40, dtype=dtype, device="meta").transpose(1, 2)
    key = torch.empty(4, time, 40, dtype=dtype, device="meta")[:, None].expand(-1, 2, -1, -1)
    forward, backward = (getattr(flash_ops, f"_{kernel}_{way}") for way in ("forward", "backward"))
    out, log_sum_exp, state = forward(query, key, key, SCALING)
    assert out.shape == query.shape
    assert (log_sum_exp.shape, log_sum_exp.dtype) == (query.shape[:-1], torch.float32)
    gradients = backward(out, (query, key, key), out, log_sum_exp, state, SCALING)
    assert [gradient.shape for gradient in gradients] == [query.shape] * 3


def test_what_does_not_belong_together_is_refused():
    query, raw_key, raw_value, key, value, log_keep = tensors = draw(5)
    with pytest.raises(ValueError, match=r"masked attention got query .* expected"):
        masked_attention(query, key.repeat(1, 2, 1, 1), value, log_keep, SCALING)
    with pytest.raises(ValueError, match=r"masked attention got query .* expected"):
        masked_attention(query[:, :3], key, value, log_keep, SCALING)
    with pytest.raises(ValueError, match=r"masked attention got query .* expected"):
        delayed_masked_attention(
            query, raw_key[:, :, 1:], raw_value, key, value, log_keep, SCALING, delay=2, keep_top=True
        )
    with pytest.raises(ValueError, match=r"hidden is torch.int64 .* expected torch.bool"):
        attend(tensors, 0, True, hidden=torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="free_channel=6 is not a channel"):
        attend(tensors, 0, True, free_channel=6)
    for delay, keep_top in [(0, False), (-1, True)]:
        with pytest.raises(ValueError, match=f"delay={delay} is not supported with keep_top={keep_top}"):
            delayed_masked_attention(*tensors, SCALING, delay=delay, keep_top=keep_top)
