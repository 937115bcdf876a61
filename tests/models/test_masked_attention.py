import math
import os
import statistics
import time

import pytest
import torch
from covering import cover
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from dmc.models.masked_attention import (
    Documents,
    as_on,
    blocked,
    causal_attention,
    delayed_masked_attention,
    fused,
    masked_attention,
    window_attention,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SCALING = 0.3
NAMES = ("query", "recent_key", "recent_value", "stream_key", "stream_value", "log_keep", "sinks")
DELAYS = (0, 1, 4, 16, 64, 300)
FEW = [(0, True), (1, False), (4, True), (16, False), (300, True)]
TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2}


def draw(time, *, heads=4, kv_heads=2, channels=6, batch=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(time)

    def normal(heads):
        states = torch.randn(batch, time, heads, channels, generator=generator, dtype=torch.float64)
        return states.transpose(1, 2).to(dtype)

    states = [normal(heads), *[normal(kv_heads) for _ in range(4)]]
    log_keep = functional.logsigmoid(2 * torch.randn(batch, kv_heads, time, generator=generator, dtype=torch.float64))
    return [tensor.requires_grad_() for tensor in (*states, log_keep.to(torch.promote_types(dtype, torch.float32)))]


def naive(tensors, delay, keep_top, hidden=None, first=None, sinks=None, window=None):
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
        if first is not None:
            bias = bias.masked_fill(torch.arange(i + 1) < first[:, i, None, None], -math.inf)
        if window is not None:
            bias = bias.masked_fill(torch.arange(i + 1) <= i - window, -math.inf)
        bias = bias.repeat_interleave(group, 1)
        scores = SCALING * torch.einsum("bhd,bhjd->bhj", query[:, :, i], keys.repeat_interleave(group, 1)) + bias
        blind = (scores == -math.inf).all(-1, keepdim=True)
        scores = scores.masked_fill(blind, 0)
        if sinks is not None:
            scores = torch.cat([scores, sinks[None, :, None].expand(len(scores), -1, 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : i + 1].masked_fill(blind, 0)
        rows.append(torch.einsum("bhj,bhjd->bhd", weights, values.repeat_interleave(group, 1)))
    return torch.stack(rows, dim=2)


def naive_of_one_stream(tensors, delay, keep_top, **options):
    """As `naive`, where the raw keys are those of the stream."""
    return naive([tensors[0], *tensors[3:5], *tensors[3:]], delay, keep_top, **options)


def attend(tensors, delay, keep_top, **options):
    if delay == 0:
        query, _, _, key, value, log_keep = tensors
        return masked_attention(query, key, value, log_keep, SCALING, **options)
    return delayed_masked_attention(*tensors, SCALING, delay=delay, keep_top=keep_top, **options)


def attend_to_one_stream(tensors, delay, keep_top, **options):
    return attend([tensors[0], None, None, *tensors[3:]], delay, keep_top, **options)


def compare(tensors, out, expected, *, tolerance=None):
    """Compare values and gradients."""
    assert out.shape == expected.shape
    tolerance = tolerance or TOLERANCES[out.dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    found = torch.autograd.grad(out, tensors, probe, materialize_grads=True)
    wanted = torch.autograd.grad(expected, tensors, probe, materialize_grads=True)
    for name, got, want in zip(NAMES[: len(tensors)], found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: name + text)


def packed(time, *starts, device="cpu"):
    """Return documents of a batch, which start where said."""
    begins = torch.zeros(len(starts), time, dtype=torch.bool)
    for row, places in enumerate(starts):
        begins[row, list(places)] = True
    return Documents.from_starts(begins.to(device))


def is_form(_, delay, keep_top):
    """Tell whether there is such a form: what drops, drops later."""
    return delay > 0 or keep_top


@pytest.mark.parametrize(("time", "delay", "keep_top"), cover((1, 5, 65, 200), DELAYS, (True, False), allowed=is_form))
def test_values_and_gradients_are_those_of_the_definition(time, delay, keep_top):
    tensors = draw(time)
    compare(tensors, attend(tensors, delay, keep_top), naive(tensors, delay, keep_top))
    found = attend_to_one_stream(tensors, delay, keep_top)
    compare(tensors, found, naive_of_one_stream(tensors, delay, keep_top))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (4, 1), (6, 2)])
@pytest.mark.parametrize(("delay", "keep_top"), [(0, True), (4, False)])
def test_query_heads_share_the_kv_head_of_their_group(heads, kv_heads, delay, keep_top):
    tensors = draw(33, heads=heads, kv_heads=kv_heads)
    compare(tensors, attend(tensors, delay, keep_top), naive(tensors, delay, keep_top))


@pytest.mark.parametrize(("delay", "keep_top"), FEW)
def test_hidden_padding_is_seen_by_nobody(delay, keep_top):
    tensors = draw(40)
    hidden = torch.zeros(2, 40, dtype=torch.bool)
    hidden[0, :23] = True  # left padding: the first rows see nothing
    hidden[1, 30:] = True
    out = attend(tensors, delay, keep_top, hidden=hidden)
    compare(tensors, out, naive(tensors, delay, keep_top, hidden))
    assert not out[0, :, :23].any()
    shorter = [tensor[:1, ..., 23:, :] if tensor.dim() == 4 else tensor[:1, :, 23:] for tensor in tensors]
    torch.testing.assert_close(out[:1, :, 23:], attend(shorter, delay, keep_top))


@pytest.mark.parametrize(
    ("scores", "delay", "keep_top"), cover((1 << 19, 1 << 10), DELAYS, (True, False), allowed=is_form)
)
def test_queries_see_their_own_document_alone(monkeypatch, scores, delay, keep_top):
    monkeypatch.setitem(blocked._SCORES, "cpu", scores)  # heads in one slice, or in many
    tensors = draw(150)
    documents = packed(150, (0, 1, 33, 64, 65, 140), (97,))
    out = attend(tensors, delay, keep_top, documents=documents)
    compare(tensors, out, naive(tensors, delay, keep_top, first=documents.first))
    begins = documents.starts[0].nonzero().flatten().tolist()
    for begin, end in zip(begins, [*begins[1:], 150], strict=True):
        alone = [tensor[:1, :, begin:end] for tensor in tensors]
        torch.testing.assert_close(attend(alone, delay, keep_top), out[:1, :, begin:end])
    hidden = torch.zeros(2, 150, dtype=torch.bool)
    hidden[0, 30:70] = True  # from within one document into another, the one between as a whole
    out = attend(tensors, delay, keep_top, documents=documents, hidden=hidden)
    compare(tensors, out, naive(tensors, delay, keep_top, hidden, documents.first))


@pytest.mark.parametrize(("delay", "keep_top"), FEW)
def test_sinks_are_a_column_of_the_softmax(delay, keep_top):
    tensors, sinks = draw(65), torch.tensor([2.0, -1.0, 0.5, 30.0], dtype=torch.float64, requires_grad=True)
    documents, hidden = packed(65, (16, 17, 40), (21,)), torch.zeros(2, 65, dtype=torch.bool)
    hidden[0, 12:17] = hidden[1, :30] = True
    found = delayed_masked_attention(*tensors, SCALING, delay=delay, keep_top=keep_top, sinks=sinks)
    compare([*tensors, sinks], found, naive(tensors, delay, keep_top, sinks=sinks))
    options = {"documents": documents, "hidden": hidden, "sinks": sinks}
    found = delayed_masked_attention(*tensors, SCALING, delay=delay, keep_top=keep_top, **options)
    compare([*tensors, sinks], found, naive(tensors, delay, keep_top, hidden, documents.first, sinks))


def in_window(tensors, window, **options):
    """Attend to the last tokens by the definition."""
    return naive_of_one_stream([*tensors[:5], torch.zeros_like(tensors[5])], 0, True, window=window, **options)


@pytest.mark.parametrize("window", [1, 8, 40, 64, 300])
def test_a_window_is_a_band(window):
    tensors, sinks = draw(165), torch.tensor([2.0, -1.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    states = tensors[0], *tensors[3:5]
    at = torch.arange(165)
    band = (at <= at[:, None]) & (at > at[:, None] - window)
    expected = functional.scaled_dot_product_attention(*states, attn_mask=band, scale=SCALING, enable_gqa=True)
    compare(states, window_attention(*states, SCALING, window), expected)
    documents, hidden = packed(165, (33, 64, 65, 150), (97,)), torch.zeros(2, 165, dtype=torch.bool)
    hidden[0, 40:70] = hidden[1, :50] = True  # longer than some windows, so that rows among them see nothing
    found = window_attention(*states, SCALING, window, hidden=hidden)
    compare(tensors, found, in_window(tensors, window, hidden=hidden))
    options = {"documents": documents, "hidden": hidden, "sinks": sinks}
    expected = in_window(tensors, window, hidden=hidden, first=documents.first, sinks=sinks)
    compare([*tensors, sinks], window_attention(*states, SCALING, window, **options), expected)


@pytest.mark.parametrize("window", [8, 128, 1000])
def test_a_window_costs_its_own_tokens_and_no_others(window):
    states = [torch.randn(1, heads, 2048, 16, requires_grad=True) for heads in (4, 2, 2)]
    with FlopCounterMode(display=False) as counted:
        window_attention(*states, SCALING, window).sum().backward()
    products = 7 * 2 * 4 * 16  # two forward, five backward, for each token that a query sees
    seen = sum(min(place + 1, window) for place in range(2048))
    assert products * seen <= counted.get_total_flops() <= products * (seen + 64 * 2048)  # in blocks of 64 rows


def test_a_cpus_plan_keeps_all_keys():
    with FakeTensorMode():
        states = [torch.empty(1, heads, 512, 16).requires_grad_() for heads in (4, 2, 2)]
        log_keep = torch.empty(1, 2, 512).requires_grad_()
        query, key, value = states
        options = {"delay": 4, "keep_top": False, "skip_below": -14.0}
        delayed_masked_attention(query, None, None, key, value, log_keep, SCALING, **options).sum().backward()
        assert log_keep.grad.shape == log_keep.shape


@pytest.mark.parametrize("window", [128, 10_000])
def test_a_gpu_counts_the_tokens_of_a_window(window):
    with FakeTensorMode(), as_on("cuda"), FlopCounterMode(display=False) as counted, _Traffic() as traffic:
        states = [torch.empty(1, heads, 4096, 64).requires_grad_() for heads in (16, 4, 4)]
        window_attention(*states, SCALING, window, sinks=torch.empty(16, requires_grad=True)).sum().backward()
    assert counted.get_total_flops() == 3.5 * 4 * 16 * 64 * 4096 * min(window, 4096)
    assert [name for name in traffic.names if name.startswith("dmc::")] == [
        "dmc::masked_attention", "dmc::masked_attention_backward",
    ]  # fmt: skip


def test_documents_know_their_bounds():
    documents = packed(6, (0, 2, 5), ())
    assert documents.starts.tolist() == [[True, False, True, False, False, True], [True] + [False] * 5]
    assert documents.first.tolist() == [[0, 0, 2, 2, 2, 5], [0] * 6]
    assert documents.end.tolist() == [[2, 2, 5, 5, 5, 6], [6] * 6]


@pytest.mark.parametrize("documents", [None, packed(70, (10, 64), (33,))])
def test_causal_attention_is_masked_attention_without_a_bias(documents):
    tensors = draw(70)
    query, key, value = (tensors[index] for index in (0, 3, 4))
    out = causal_attention(query, key, value, SCALING, documents)
    first = None if documents is None else documents.first
    expected = naive_of_one_stream([*tensors[:5], torch.zeros_like(tensors[5])], 0, True, first=first)
    compare(tensors, out, expected)


@pytest.mark.parametrize(("delay", "keep_top"), [(0, True), (1, False), (4, True), (16, False)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_keys_at_minus_infinity_vanish_and_leave_finite_gradients(dtype, delay, keep_top):
    tensors = draw(50)
    with torch.no_grad():
        tensors[-1][..., ::3] = -math.inf
        tensors[-1][..., 1::3] = 0
    tensors = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
    out = attend(tensors, delay, keep_top)
    expected = naive([tensor.double() for tensor in tensors], delay, keep_top)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    gradients = torch.autograd.grad(out.square().sum(), tensors, materialize_grads=True)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[-1][..., ::3].any()


def test_no_delay_is_masked_attention():
    tensors = draw(40)
    merged = delayed_masked_attention(*tensors, SCALING, delay=0, keep_top=True)
    torch.testing.assert_close(merged, attend(tensors, 0, True), rtol=0, atol=0)


@pytest.mark.parametrize(("delay", "keep_top"), [(0, True), (16, True), (16, False)])
@pytest.mark.parametrize("autocast", [False, True])
def test_sixteen_bit_is_as_near_as_its_rounding(autocast, delay, keep_top):
    tensors = draw(200, channels=16, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = attend(tensors, delay, keep_top)
    assert out.dtype == torch.bfloat16
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = naive(exact, delay, keep_top)
    assert (out - expected).norm() < 1e-2 * expected.norm()
    found = torch.autograd.grad(out.float().square().sum(), tensors, materialize_grads=True)
    wanted = torch.autograd.grad(expected.square().sum(), exact, materialize_grads=True)
    for name, got, want in zip(NAMES[: len(tensors)], found, wanted, strict=True):
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
def test_no_tensor_is_time_by_time(delay, keep_top):
    time = 2048
    tensors = draw(time, channels=8, batch=1, dtype=torch.float32)
    with _LargestOutput() as largest:
        attend(tensors, delay, keep_top, documents=packed(time, (100, 900))).sum().backward()
    assert largest.elements < time * time / 4  # of one head


@pytest.mark.parametrize(("delay", "keep_top"), [(0, True), (4, True), (4, False)])
def test_recomputation_under_checkpointing_gives_the_same_gradients(delay, keep_top):
    tensors = draw(40)
    used = tensors if delay else [tensors[0], *tensors[3:]]

    def loss(*inputs):
        inputs = inputs if delay else (inputs[0], None, None, *inputs[1:])
        return attend(list(inputs), delay, keep_top).square().sum()

    plain = torch.autograd.grad(loss(*used), used)
    recomputed = torch.autograd.grad(checkpoint(loss, *used, use_reentrant=False), used)
    for got, want in zip(recomputed, plain, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


class _Traffic(TorchDispatchMode):
    """Counts operations, and the bytes that all but the fused one read and write; views move nothing."""

    def __init__(self):
        super().__init__()
        self.names, self.bytes = [], 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        out = function(*arguments, **(keywords or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if made and function.overloadpacket not in (torch.ops.aten.detach, torch.ops.aten.view):
            self.names.append(function.name())
            if function.namespace != "dmc":
                touched = made + [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
                self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in touched)
        return out


def traffic(delay, keep_top, documents=None, time=4096):
    """Run forward and backward of Llama-3.1-8B's heads as a GPU would, under bf16 autocast, on shapes alone."""
    with FakeTensorMode(allow_non_fake_inputs=True), as_on("cuda"):
        shapes = [(32,), (8,), (8,), (8,), (8,)]
        states = [torch.empty(1, time, *heads, 128).transpose(1, 2).requires_grad_() for heads in shapes]
        states[2], states[4] = (states[i].detach().bfloat16().requires_grad_() for i in (2, 4))
        log_keep = torch.empty(1, 8, time, requires_grad=True)
        if not keep_top or not delay:
            states[1:3] = None, None
        with _Traffic() as counted, FlopCounterMode(display=False) as flops:
            with torch.autocast("cpu", torch.bfloat16):
                out = attend([*states, log_keep], delay, keep_top, documents=documents)
            grads = torch.autograd.grad(out, [tensor for tensor in (*states, log_keep) if tensor is not None], out)
            assert out.dtype == torch.bfloat16 and grads[-1].dtype == torch.float32
    counted.per_query_element = counted.bytes / (32 * time * 128)
    counted.flops = flops.get_total_flops()
    return counted


@pytest.mark.parametrize(("delay", "keep_top"), [(0, True), (16, True), (16, False), (512, True), (2048, False)])
def test_a_gpu_runs_one_kernel_whatever_the_delay_and_the_documents(delay, keep_top):
    counted = traffic(delay, keep_top)
    fused = [name for name in counted.names if name.startswith("dmc::")]
    assert fused == ["dmc::masked_attention", "dmc::masked_attention_backward"]
    assert counted.per_query_element <= 24  # casts of the rotated float32 states to bf16, and of their gradients back
    assert len(counted.names) <= 9
    assert counted.flops == 3.5 * 4 * 32 * 128 * 4096**2
    eight = traffic(delay, keep_top, packed(4096, range(0, 4096, 512)))
    assert eight.names == counted.names and eight.bytes == counted.bytes


def test_what_a_gpu_cannot_fuse_takes_matrix_products():
    for options in ({"dtype": torch.float64}, {"channels": 272, "dtype": torch.float32}):
        with as_on("cuda"), _Traffic() as counted:
            attend(draw(4, **options), 0, True)
        assert not [name for name in counted.names if name.startswith("dmc::")]


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
    with pytest.raises(ValueError, match=r"masked attention got query .* expected"):
        delayed_masked_attention(query, None, raw_value, key, value, log_keep, SCALING, delay=2, keep_top=True)
    with pytest.raises(ValueError, match=r"hidden is torch.int64 .* expected torch.bool"):
        attend(tensors, 0, True, hidden=torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(ValueError, match=r"documents are those of \(2, 4\) tokens; expected \(2, 5\)"):
        attend(tensors, 0, True, documents=packed(4, (), ()))
    for delay, keep_top in [(0, False), (-1, True)]:
        with pytest.raises(ValueError, match=f"delay={delay} is not supported with keep_top={keep_top}"):
            delayed_masked_attention(*tensors, SCALING, delay=delay, keep_top=keep_top)


@pytest.fixture
def interpreter(monkeypatch):
    """Run Triton's kernels on a CPU, in tiles of 16 x 16 that short sequences cross."""
    if not INTERPRETED:
        pytest.skip("runs in a process that tests/kernels/test_interpreter.py starts")
    monkeypatch.setattr(fused, "tile", lambda *_: (16, 16, 4, 1))
    with as_on("cuda"):
        yield


ON_GPU = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest difference beside the largest number."""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "channels", "form", "others"),
    cover(
        tuple(ON_GPU),
        (64, 80, 128, 256),
        ((0, True), (16, True), (100, True), (16, False)),
        ("", "documents, padding", "documents, padding, sinks"),
    ),
    ids=str,
)
def test_a_gpu_computes_the_definition(dtype, channels, form, others):
    (delay, keep_top), time, options, precise_options = form, 150, {}, {}
    tensors = draw(time, dtype=dtype, channels=channels)
    placed = [tensor.detach().cuda().requires_grad_() for tensor in tensors]
    precise = [tensor.detach().double().requires_grad_() for tensor in tensors]
    leaves, precise_leaves = [*placed], [*precise]
    if "padding" in others:
        hidden = torch.zeros(2, time, dtype=torch.bool)
        hidden[0, 12:17] = hidden[1, :100] = True
        documents = packed(time, (16, 17, 70, 140), (121,))
        options = {"hidden": hidden.cuda(), "documents": packed(time, (16, 17, 70, 140), (121,), device="cuda")}
        precise_options = {"hidden": hidden, "first": documents.first}
    if "sinks" in others and delay > 0:  # `masked_attention` has none
        sinks = torch.tensor([1.5, -2.0, 0.0, 0.5])
        options["sinks"], precise_options["sinks"] = sinks.cuda().requires_grad_(), sinks.double().requires_grad_()
        leaves.append(options["sinks"])
        precise_leaves.append(precise_options["sinks"])
    found, expected = attend(placed, delay, keep_top, **options), naive(precise, delay, keep_top, **precise_options)
    probe = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    ours = [found, *torch.autograd.grad(found, leaves, probe.cuda(), materialize_grads=True)]
    wanted = [expected, *torch.autograd.grad(expected, precise_leaves, probe.double(), materialize_grads=True)]
    for name, got, want in zip(("output", *NAMES), ours, wanted, strict=False):
        worst = (got.cpu().double() - want).abs().max() / want.abs().max().clamp_min(1e-3)
        assert worst <= ON_GPU[dtype], (name, worst)


LENGTH = 37
"""Of interpreted sequences: two tiles and a part of one."""
CASES = {
    "merge, divided": (0, True, "documents, padding", {"batch": 2}),
    "merge, delayed": (5, True, "padding, sinks", {}),
    "merge, delayed by more than a block": (20, True, "documents", {}),
    "merge, delayed by more than the sequence": (300, True, "", {"heads": 4, "kv_heads": 2}),
    "drop": (1, False, "sinks", {}),
    "drop later": (20, False, "documents, padding, sinks", {}),
    "one key": (0, True, "", {"time": 1}),
    "no head shares": (5, True, "", {"time": 20, "kv_heads": 2}),
    "channels": (5, True, "", {"time": 20, "channels": 16}),
    "merge, most keys skipped": (0, True, "skipped", {"time": 70, "kv_heads": 2}),
    "merge, delayed, keys skipped": (20, True, "documents, padding, sinks, skipped", {"time": 53}),
    "drop, keys skipped": (5, False, "documents, padding, skipped", {"time": 53}),
}
INTERPRETED_FORMS = [(0, True), (5, True), (20, True), (300, True), (1, False), (20, False)]
OTHERS = ("", "sinks", "padding", "documents, padding, sinks", "skipped", "documents, padding, sinks, skipped")


def compare_kernels(delay, keep_top, others, changes):
    tensors = draw(**{"time": LENGTH, "batch": 1, "heads": 2, "kv_heads": 1, "dtype": torch.float32} | changes)
    rows, time = tensors[0].shape[0], tensors[0].shape[2]
    options, wanted = {}, {}
    if "documents" in others:
        options["documents"] = packed(time, *([16, 17, 30], [21])[:rows])
        wanted["first"] = options["documents"].first
    if "skipped" in others:
        tensors[-1] = thresholded(tensors[-1])
    if "padding" in others:
        options["hidden"] = wanted["hidden"] = torch.zeros(rows, time, dtype=torch.bool)
        options["hidden"][0, 12:17] = options["hidden"][rows - 1, :9] = True
        with torch.no_grad():
            tensors[-1][..., ::4] = -math.inf
    leaves = [*tensors]
    if "sinks" in others:
        options["sinks"] = wanted["sinks"] = torch.tensor([1.5, -2.0], requires_grad=True)
        leaves.append(options["sinks"])
    out = delayed_masked_attention(*tensors, SCALING, delay=delay, keep_top=keep_top, **options)
    compare(leaves, out, naive(tensors, delay, keep_top, **wanted))


@pytest.mark.parametrize("case", CASES)
def test_kernels_are_those_of_the_definition(interpreter, case):
    compare_kernels(*CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize(("form", "others"), cover(INTERPRETED_FORMS, OTHERS), ids=str)
def test_kernels_are_those_of_the_definition_in_every_form(interpreter, form, others):
    compare_kernels(*form, others, {})


def test_kernels_take_the_raw_keys_from_the_stream(interpreter):
    tensors = draw(LENGTH, batch=1, heads=2, kv_heads=1, dtype=torch.float32)
    compare(tensors, attend_to_one_stream(tensors, 5, False), naive_of_one_stream(tensors, 5, False))


@pytest.mark.parametrize("window", [21, pytest.param(1, marks=pytest.mark.slow)])
def test_kernels_walk_a_window(interpreter, window):
    tensors, sinks = draw(53, dtype=torch.float32, heads=2, kv_heads=1, batch=1), torch.tensor([1.5, -2.0])
    documents, hidden = packed(53, (16, 17, 45)), torch.zeros(1, 53, dtype=torch.bool)
    hidden[0, 12:14] = True
    states = tensors[0], *tensors[3:5]
    sinks.requires_grad_()
    options = {"documents": documents, "hidden": hidden, "sinks": sinks}
    found = window_attention(*states, SCALING, window, **options)
    expected = in_window(tensors, window, hidden=hidden, first=documents.first, sinks=sinks)
    compare([*tensors, sinks], found, expected)
    found = window_attention(*states, SCALING, window)
    compare(tensors, found, in_window(tensors, window))


def test_kernels_multiply_no_block_beyond_a_window(interpreter, monkeypatch):
    from triton.runtime.interpreter import InterpreterBuilder

    dot, products = InterpreterBuilder.create_dot, []
    monkeypatch.setattr(InterpreterBuilder, "create_dot", lambda *given: (products.append(1), dot(*given))[1])
    states = [tensor[:, :1].contiguous() for tensor in draw(128, dtype=torch.float32, batch=1)[:3]]
    window_attention(*states, SCALING, 16).sum().backward()
    # Each of 8 blocks of rows sees its own keys and those before; 2 products forward, 3 of the queries, 4 of the keys.
    assert len(products) == (2 + 3 + 4) * (8 + 7)


def test_kernels_need_no_bias(interpreter):
    tensors = draw(LENGTH, dtype=torch.float32, batch=1, heads=2, kv_heads=1)
    documents = packed(LENGTH, (16, 30))
    out = causal_attention(tensors[0], tensors[3], tensors[4], SCALING, documents)
    expected = naive_of_one_stream([*tensors[:5], torch.zeros_like(tensors[5])], 0, True, first=documents.first)
    compare(tensors, out, expected)


def test_kernels_gather_the_keys_that_count_in_their_order(interpreter, monkeypatch):
    monkeypatch.setattr(fused, "NUMBERED", 16)
    monkeypatch.setattr(fused, "GATHERED", 16)
    tensors = draw(LENGTH, dtype=torch.float32)
    key, value, log_keep = (tensor.detach() for tensor in (*tensors[3:5], thresholded(tensors[5])))
    log_keep[0, 1] = -math.inf
    hidden = torch.zeros(2, LENGTH, dtype=torch.bool)
    hidden[1, :9] = True
    keep = (log_keep > -1.5) & ~hidden[:, None]
    found = fused._kept(key, value, log_keep, hidden, -1.5)
    for row in range(2):
        for head in range(log_keep.shape[1]):
            kept_key, kept_value, bias, places, counts = (tensor[row, head] for tensor in found)
            expected = keep[row, head].nonzero()[:, 0]
            count = len(expected)
            assert places.tolist() == [*expected.tolist(), *[LENGTH] * (LENGTH - count)]
            assert counts.tolist() == [int(keep[row, head, :place].sum()) for place in range(LENGTH + 1)]
            for got, states in ((kept_key, key), (kept_value, value), (bias, log_keep)):
                torch.testing.assert_close(got[:count], states[row, head, expected], rtol=0, atol=0)
                assert not got[count:].any()


def thresholded(log_keep, share=0.7, low=-math.inf):
    """Return biases as thresholded decisions have them: `low` for a share of the keys, else what was drawn."""
    generator = torch.Generator().manual_seed(7)
    skipped = torch.rand(log_keep.shape, generator=generator) < share
    return log_keep.detach().masked_fill(skipped, low).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("delay", "keep_top"), [(0, True), (1, False), (4, True), (16, False), (64, True), (300, False)]
)
def test_keys_that_nobody_sees_are_left_out_exactly(delay, keep_top, dtype):
    tensors = draw(200, heads=6, kv_heads=2, dtype=dtype)
    tensors[5] = thresholded(tensors[5])
    compare(tensors, attend(tensors, delay, keep_top), naive(tensors, delay, keep_top), tolerance=1e-5)
    whole = attend(tensors, delay, keep_top, skip_below=None)
    compare(tensors, attend(tensors, delay, keep_top), whole, tolerance=1e-5)
    found = attend_to_one_stream(tensors, delay, keep_top)
    compare(tensors, found, naive_of_one_stream(tensors, delay, keep_top), tolerance=1e-5)


@pytest.mark.parametrize(
    ("scores", "delay", "keep_top"), cover((1 << 19, 1 << 10), (0, 4, 16, 64), (True, False), allowed=is_form)
)
def test_keys_are_left_out_of_their_own_document(monkeypatch, scores, delay, keep_top):
    monkeypatch.setitem(blocked._SCORES, "cpu", scores)
    tensors = draw(150)
    tensors[5] = thresholded(tensors[5])
    documents, sinks = (
        packed(150, (0, 1, 33, 64, 65, 140), (97,)),
        torch.randn(4, dtype=torch.float64, requires_grad=True),
    )
    hidden = torch.zeros(2, 150, dtype=torch.bool)
    hidden[0, 70:90] = hidden[1, :40] = True
    options = {"hidden": hidden}
    out = attend(tensors, delay, keep_top, documents=documents, **options)
    compare(tensors, out, naive(tensors, delay, keep_top, first=documents.first, **options))
    if delay:
        out = attend(tensors, delay, keep_top, sinks=sinks, documents=documents)
        compare([*tensors, sinks], out, naive(tensors, delay, keep_top, first=documents.first, sinks=sinks))


def test_heads_may_keep_any_number_of_keys():
    tensors = draw(200)
    log_keep = tensors[5].detach().clone()
    log_keep[0, 0], log_keep[0, 1, 50:], log_keep[1, 0, :150] = -math.inf, -math.inf, -math.inf
    tensors[5] = log_keep.requires_grad_()
    compare(tensors, attend(tensors, 0, True), naive(tensors, 0, True))


def test_what_training_leaves_out_changes_weights_by_less_than_its_bound():
    low, scale = -30.0, 4.0  # scores of some 10 and more
    tensors = draw(200, channels=32)
    with torch.no_grad():
        tensors[0].mul_(scale)
    tensors[5] = thresholded(tensors[5], low=low)
    key = tensors[3].repeat_interleave(2, 1)
    scores = SCALING * tensors[0] @ key.mT
    gap = (scores - scores.diagonal(dim1=-2, dim2=-1)[..., None]).tril().max()
    bound = 2 * 200 * math.exp(low + gap) * max(tensor.detach().abs().max() for tensor in tensors[:5]) ** 3
    whole, found = (attend(tensors, 0, True, skip_below=below) for below in (None, low))
    assert gap > 10
    assert 0 < (found - whole).abs().max() < bound
    for got, want in zip(*(torch.autograd.grad(out.sum(), tensors[3:]) for out in (found, whole)), strict=False):
        assert (got - want).abs().max() < 200 * bound


@pytest.mark.slow
def test_a_cpu_takes_little_longer_than_for_causal_attention():
    """Attention of a merge gate took 1.0 to 1.3 times as long; a product or a pass over the scores more shows."""
    states = [torch.randn(1, 1024, heads, 64).transpose(1, 2).requires_grad_() for heads in (8, 8, 8)]
    logits = torch.randn(1, 8, 1024, requires_grad=True)
    few = torch.where(torch.rand(1, 8, 1024) < 0.3, 0.0, -math.inf).requires_grad_()
    cases = {
        "causal": lambda: causal_attention(*states, 0.125),
        "merge": lambda: masked_attention(*states, functional.logsigmoid(logits), 0.125),
        "few": lambda: masked_attention(*states, few, 0.125),
    }
    seconds = {name: [] for name in cases}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(9):
            for name, attend_once in cases.items():
                start = time.process_time()
                attend_once().sum().backward()
                seconds[name].append(time.process_time() - start)
    finally:
        torch.set_num_threads(threads)
    causal, merge, few_kept = (statistics.median(times) for times in seconds.values())
    assert merge < 1.7 * causal
    assert few_kept < 0.85 * merge
