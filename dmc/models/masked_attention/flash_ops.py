"""Causal flash attention of each device: a forward that returns the log-sum-exp, and a backward that takes it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_aten: Any = torch.ops.aten
Three = tuple[Tensor, Tensor, Tensor]
"""Of query, key and value."""


@dataclass(frozen=True)
class FlashKernel:
    """One device's causal flash attention; all states are [batch, heads, time, channels].

    `forward(query, key, value, scaling)` gives (out, log-sum-exp float32 [batch, heads, time], state for backward).
    `backward(grad, (query, key, value), out, log_sum_exp, state, scaling)` gives the gradients of the three.
    With the output and log-sum-exp of a softmax over *more* keys than these, backward gives these keys' share of the
    gradient, as in ring attention.
    """

    forward: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Sequence[Any]]]
    backward: Callable[[Tensor, Three, Tensor, Tensor, Any, float], Three]
    multiple: int
    """The head dimension must be a multiple of this."""


def find_flash_kernel(query: Tensor) -> FlashKernel | None:
    """Return the flash kernel for `query`'s device, dtype and head dimension, or None if there is none."""
    if query.device.type == "cpu":
        return FlashKernel(_cpu_forward, _cpu_backward, multiple=1)
    if query.device.type != "cuda" or query.dtype == torch.float64:
        return None
    is_ampere = torch.cuda.get_device_capability(query.device) >= (8, 0)
    if query.dtype != torch.float32 and is_ampere and query.shape[-1] < 256:
        return FlashKernel(_cuda_forward, _cuda_backward, multiple=8)
    if query.dtype != torch.bfloat16 or is_ampere:
        return FlashKernel(_efficient_forward, _efficient_backward, multiple=8)
    return None


def _cpu_forward(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor, Sequence[Any]]:
    out, log_sum_exp = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=scaling)
    return out, log_sum_exp, ()


def _cpu_backward(grad: Tensor, given: Three, out: Tensor, log_sum_exp: Tensor, state: Any, scaling: float) -> Three:
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, *given, out, log_sum_exp, 0.0, True, scale=scaling
    )


def _cuda_forward(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor, Sequence[Any]]:
    out, log_sum_exp, *state, _ = _aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, True, False, scale=scaling
    )
    return out, log_sum_exp, state  # state: cum_seq_q, cum_seq_k, max_q, max_k, rng_state, unused


def _cuda_backward(grad: Tensor, given: Three, out: Tensor, log_sum_exp: Tensor, state: Any, scaling: float) -> Three:
    cum_seq_q, cum_seq_k, max_q, max_k, seed, offset = state
    return _aten._scaled_dot_product_flash_attention_backward(
        grad, *given, out, log_sum_exp.contiguous(), cum_seq_q, cum_seq_k, max_q, max_k, 0.0, True,
        seed, offset, scale=scaling,
    )  # fmt: skip


def _efficient_forward(
    query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Sequence[Any]]:
    out, log_sum_exp, seed, offset = _aten._scaled_dot_product_efficient_attention(
        query, key, value, None, True, 0.0, True, scale=scaling
    )
    return out, log_sum_exp[..., : query.shape[2]], (seed, offset)


def _efficient_backward(
    grad: Tensor, given: Three, out: Tensor, log_sum_exp: Tensor, state: Any, scaling: float
) -> Three:
    # This kernel reads the log-sum-exp of whole tiles of 32 rows; +inf gives the rows behind the end no weight.
    padded = functional.pad(log_sum_exp, (0, -log_sum_exp.shape[-1] % 32), value=torch.inf).contiguous()
    grads = _aten._scaled_dot_product_efficient_attention_backward(
        grad, *given, None, out, padded, *state, 0.0, [True, True, True, False], True, scale=scaling
    )
    return grads[:3]
