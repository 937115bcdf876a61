"""Masked attention as one operator of PyTorch: Triton kernels on a GPU; shapes and FLOPs on any device.

FlexAttention could state the same scores: a score_mod that adds captured biases, a block mask of documents. It is not
used: the gradient of a captured tensor is an atomic addition for each score, a delayed merge's two ranges would be two
calls and a merge, and it has no backward on a CPU, where plans trace a GPU's step and tests run these kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from dmc.kernels.base import HOPPER, major_capability

LARGEST_HEAD = 256
NUMBERED, GATHERED = 1024, 64
"""Keys that a program numbers at once, and that one gathers."""
_LOG2_E = 1.4426950408889634


@torch.library.custom_op("dmc::masked_attention", mutates_args=())
def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_keep: Tensor | None,
    recent_key: Tensor | None,
    recent_value: Tensor | None,
    hidden: Tensor | None,
    first: Tensor | None,
    end: Tensor | None,
    scaling: float,
    delay: int,
    keep_top: bool,
    window: int | None,
    skip_below: float | None,
) -> tuple[Tensor, Tensor]:
    """Attend, see `delayed_masked_attention` and `window_attention`.

    Args:
        query: [B, H_q, T, D].
        key: the stream, [B, H, T, D].
        value: [B, H, T, D].
        log_keep: biases, float32 [B, H, T]; None: all are 0.
        recent_key: raw keys of the newest `delay` tokens, [B, H, T, D]; None: those of the stream.
        recent_value: likewise.
        hidden: True at keys that no query sees, [B, T].
        first: of `Documents`.
        end: of `Documents`.
        scaling: multiplies query . key.
        delay: newest tokens without a bias.
        keep_top: whether the token before those has none either.
        window: newest tokens of the stream that a query sees, with delay=0; None: all.
        skip_below: keys whose bias is at most this are left out where they have it; None: none is.
    Returns:
        The output, laid out in memory as [B, T, H_q, D], and the rows' log-sum-exps to base 2, float32 [B, H_q, T]:
        +inf where a row sees nothing.
    """
    from dmc.models.masked_attention.kernels import forward_kernel

    query, key, value = _rows(query), _rows(key), _rows(value)
    recent = None if recent_key is None or recent_value is None else (_rows(recent_key), _rows(recent_value))
    out, log_sum_exp = _shapes_of_forward(query)
    kept_key, kept_value, bias, places, counts = _kept(key, value, log_keep, hidden, skip_below)
    sizes = _sizes("forward", query, key)
    with torch.cuda.device_of(query):
        forward_kernel[_grid(query, sizes["ROWS"])](
            query, key, value, bias, *(recent or (None, None)), kept_key, kept_value, places, counts,
            _contiguous(hidden), _contiguous(first), out, log_sum_exp,
            *_strides(query, key, value, *(recent or (key, value)), *_or(kept_key, kept_value, key, value), out),
            query.shape[2], scaling * _LOG2_E,
            *_range(recent is not None, log_keep is not None, delay, keep_top, window), **sizes,
        )  # fmt: skip
    return out, log_sum_exp


@torch.library.custom_op("dmc::masked_attention_backward", mutates_args=())
def fused_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_keep: Tensor | None,
    recent_key: Tensor | None,
    recent_value: Tensor | None,
    hidden: Tensor | None,
    first: Tensor | None,
    end: Tensor | None,
    out: Tensor,
    log_sum_exp: Tensor,
    scaling: float,
    delay: int,
    keep_top: bool,
    window: int | None,
    skip_below: float | None,
) -> list[Tensor]:
    """Return the gradients of query, key, value, and of log_keep, recent_key and recent_value where they are given."""
    from dmc.models.masked_attention.kernels import key_gradient_kernel, query_gradient_kernel

    grad, query, key, value = _rows(grad), _rows(query), _rows(key), _rows(value)
    recent = None if recent_key is None or recent_value is None else (_rows(recent_key), _rows(recent_value))
    hidden, first, end = (_contiguous(tensor) for tensor in (hidden, first, end))
    kept_key, kept_value, bias, places, counts = _kept(key, value, log_keep, hidden, skip_below)
    gradients = _shapes_of_backward(query, key, value, log_keep, recent)
    query_grad, key_grad, value_grad, *others = gradients
    bias_grad = None if log_keep is None else others[0]
    delta, time = torch.empty_like(log_sum_exp), query.shape[2]
    ranges = _range(recent is not None, log_keep is not None, delay, keep_top, window)
    sizes = _sizes("query_gradient", query, key)
    with torch.cuda.device_of(query):
        query_gradient_kernel[_grid(query, sizes["ROWS"])](
            query, key, value, bias, *(recent or (None, None)), kept_key, kept_value, places, counts, hidden, first,
            out, grad, log_sum_exp, delta, query_grad,
            *_strides(query, key, value, *(recent or (key, value)), *_or(kept_key, kept_value, key, value)),
            *_strides(out, grad, query_grad),
            time, scaling * _LOG2_E, *ranges, **sizes,
        )  # fmt: skip
        sizes = _sizes("key_gradient", query, key)
        launches: list[tuple[Any, Any, tuple[int, int | None, int]]]
        launches = [((key, value, bias, None), (key_grad, value_grad, bias_grad), ranges)]
        if kept_key is not None and bias_grad is not None:  # first without biases, then these keys with theirs
            bias_grad.zero_()
            lag, _, near = ranges
            launches = [
                ((key, value, None, None), (key_grad, value_grad, None), (lag, near, lag)),
                ((kept_key, kept_value, bias, places), (key_grad, value_grad, bias_grad), (near, None, near)),
            ]
        if recent is not None:
            launches.append(((*recent, None, None), (*others[-2:], None), (0, delay, 0)))
        for (keys, values, *of_keys), to, its_range in launches:
            strides = _strides(query, keys, values, grad, *to[:2])
            key_gradient_kernel[_grid(key, sizes["KEYS"])](
                query, keys, values, *of_keys, hidden, first, end, grad, log_sum_exp, delta, *to, *strides,
                time, scaling * _LOG2_E, *its_range, **sizes,
            )  # fmt: skip
    return gradients


def _shapes_of_forward(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


def _shapes_of_backward(
    query: Tensor, key: Tensor, value: Tensor, log_keep: Tensor | None, recent: tuple[Tensor, Tensor] | None
) -> list[Tensor]:
    gradients = [torch.empty_like(states) for states in (query, key, value)]
    if log_keep is not None:
        gradients.append(torch.empty_like(log_keep, memory_format=torch.contiguous_format))
    return gradients + [torch.empty_like(states) for states in recent or ()]


fused_attention.register_fake(_shapes_of_forward)


@fused_attention_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, log_keep: Tensor | None, recent_key: Tensor | None,
    recent_value: Tensor | None, *_: Any,
) -> list[Tensor]:  # fmt: skip
    recent = None if recent_key is None or recent_value is None else (_rows(recent_key), _rows(recent_value))
    return _shapes_of_backward(_rows(query), _rows(key), _rows(value), log_keep, recent)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scaling, ctx.delay, ctx.keep_top, ctx.window, ctx.skip_below = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    *tensors, out, log_sum_exp = ctx.saved_tensors
    options = ctx.scaling, ctx.delay, ctx.keep_top, ctx.window, ctx.skip_below
    query, key, value, *others = fused_attention_backward(grad, *tensors, out, log_sum_exp, *options)
    of_bias = None if tensors[3] is None else others.pop(0)
    return query, key, value, of_bias, *(others or (None, None)), *[None] * 8


fused_attention.register_autograd(_differentiate, setup_context=_save)


class FusedWithSinks(torch.autograd.Function):
    """The same with one more column of the softmax, of a logit for each head and a value of 0.

    The weights are then those of the larger log-sum-exp, and the column adds nothing to output . gradient, so that the
    kernels of the backward need not know of it.
    """

    @staticmethod
    def forward(ctx: Any, sinks: Tensor, *inputs: Any) -> Tensor:
        """Attend; `inputs` are those of `fused_attention`, sinks [H_q]."""
        out, log_sum_exp = fused_attention(*inputs)
        total = torch.logaddexp2(log_sum_exp, _column(sinks))
        share = torch.exp2(log_sum_exp - total).nan_to_num(0.0)  # infinite where a row sees nothing
        out = (out * share[..., None]).to(out.dtype)
        *tensors, ctx.scaling, ctx.delay, ctx.keep_top, ctx.window, ctx.skip_below = inputs
        ctx.save_for_backward(sinks, *tensors, out, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `forward`'s inputs."""
        sinks, *tensors, out, total = ctx.saved_tensors
        options = ctx.scaling, ctx.delay, ctx.keep_top, ctx.window, ctx.skip_below
        query, key, value, *others = fused_attention_backward(grad, *tensors, out, total, *options)
        of_bias = None if tensors[3] is None else others.pop(0)
        deltas = (out.float() * grad.float()).sum(-1)
        of_sinks = -(torch.exp2(_column(sinks) - total) * deltas).sum((0, 2)).to(sinks.dtype)
        return of_sinks, query, key, value, of_bias, *(others or (None, None)), *[None] * 8


def _column(sinks: Tensor) -> Tensor:
    return sinks.float()[None, :, None] * _LOG2_E


@register_flop_formula(torch.ops.dmc.masked_attention)
def _(query: Any, key: Any, value: Any, *others: Any, **__: Any) -> int:
    """Count all scores, as torch does for its own causal attention, or those of a window."""
    keys = _seen(query, key, others[-2])
    return sdpa_flop_count(query, keys, keys)


@register_flop_formula(torch.ops.dmc.masked_attention_backward)
def _(grad: Any, query: Any, key: Any, value: Any, *others: Any, **__: Any) -> int:
    keys = _seen(query, key, others[-2])
    return sdpa_backward_flop_count(grad, query, keys, keys)


def _seen(query: Any, key: Any, window: int | None) -> tuple[int, ...]:
    """Return the shape of keys repeated for all query heads, of which a query sees no more than a window."""
    return key[0], query[1], key[2] if window is None else min(key[2], window), key[3]


def _range(
    has_recent: bool, has_bias: bool, delay: int, keep_top: bool, window: int | None
) -> tuple[int, int | None, int]:
    """Return from which distance on a key of the stream is seen, up to which, and from which on it has its bias."""
    lag = delay if has_recent else 0
    return lag, window, delay + keep_top if has_bias else lag


def _kept(
    key: Tensor, value: Tensor, log_keep: Tensor | None, hidden: Tensor | None, skip_below: float | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gather the keys that count, in their order, without a read of their number, by two kernels.

    Returns:
        Keys and values [B, H, T, D] and biases [B, H, T], those kept first; where each was, int32 [B, H, T], T behind
        the last; how many there are before each place, int32 [B, H, T + 1]. None, None, log_keep, None, None: all are.
    """
    if log_keep is None or skip_below is None:
        return None, None, _contiguous(log_keep), None, None
    from dmc.models.masked_attention.kept_keys import gather_kernel, number_kernel

    log_keep, (batch, heads, time, channels) = log_keep.contiguous(), key.shape
    bias, places = torch.empty_like(log_keep), log_keep.new_empty(log_keep.shape, dtype=torch.int32)
    counts = log_keep.new_empty(batch, heads, time + 1, dtype=torch.int32)
    kept_key, kept_value = (states.new_empty(key.shape) for states in (key, value))
    with torch.cuda.device_of(key):
        number_kernel[(batch * heads,)](
            log_keep, _contiguous(hidden), bias, places, counts, time, skip_below, KV_HEADS=heads, KEYS=NUMBERED
        )
        gather_kernel[_grid(key, GATHERED)](
            key, value, places, kept_key, kept_value, *_strides(key, value, kept_key), time,
            KV_HEADS=heads, HEAD_DIM=channels, CHANNELS=_channels(channels), KEYS=GATHERED,
        )  # fmt: skip
    return kept_key, kept_value, bias, places, counts


def _or(kept_key: Tensor | None, kept_value: Tensor | None, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return (key, value) if kept_key is None or kept_value is None else (kept_key, kept_value)


def _rows(states: Tensor) -> Tensor:
    return states if states.stride(-1) == 1 else states.contiguous()


def _contiguous(states: Tensor | None) -> Tensor | None:
    return None if states is None else states.contiguous()


def _strides(*states: Tensor) -> list[tuple[int, ...]]:
    return [tensor.stride()[:3] for tensor in states]


def _grid(states: Tensor, size: int) -> tuple[int, int]:
    return -(-states.shape[2] // size), states.shape[0] * states.shape[1]


HOPPER_TILES = {
    64: {"forward": (64, 128, 4, 3), "query_gradient": (64, 64, 4, 3), "key_gradient": (64, 64, 4, 3)},
    128: {"forward": (128, 128, 8, 3), "query_gradient": (128, 64, 8, 3), "key_gradient": (64, 128, 8, 3)},
}
"""What an H100 is fastest with, of some 25 tiles of each kernel, though some spill: by channels, with 16-bit states."""


def tile(kernel: str, channels: int, itemsize: int, major: int) -> tuple[int, int, int, int]:
    """Return rows, keys, warps and stages of a kernel's programs, for which a GPU of this capability has registers."""
    if itemsize == 4:
        return (32, 32, 4 if kernel == "forward" else 8, 1) if channels <= 128 else (16, 16, 4, 1)
    if channels <= 128 and major == HOPPER:
        return HOPPER_TILES[max(64, channels)][kernel]
    if channels <= 128:
        return (64, 64, 8, 2) if kernel == "key_gradient" else (64, 32, 4, 2)
    return {"forward": (64, 32, 8, 1), "query_gradient": (32, 32, 4, 1), "key_gradient": (32, 32, 8, 1)}[kernel]


def _channels(head_dim: int) -> int:
    """Return the channels of a tile: a power of two."""
    return max(16, 1 << (head_dim - 1).bit_length())


def _sizes(kernel: str, query: Tensor, key: Tensor) -> dict[str, Any]:
    channels = _channels(query.shape[-1])
    rows, keys, warps, stages = tile(kernel, channels, query.element_size(), major_capability(query.device))
    is_exact = query.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return {
        "KV_HEADS": key.shape[1],
        "GROUP": query.shape[1] // key.shape[1],
        "HEAD_DIM": query.shape[-1],
        "CHANNELS": channels,
        "ROWS": rows,
        "KEYS": keys,
        "PRECISION": "ieee" if is_exact else "tf32",
        "num_warps": warps,
        "num_stages": stages,
    }
