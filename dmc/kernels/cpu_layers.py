"""Parts of decoder layers for few rows, compiled: a decode step is made of them, and torch is slow at their size.

Each serves up to `ROWS` rows, one for each token of a step, of dtypes and sizes that compiled code knows. Where these
do not fit, linear layers and MLPs are torch's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import silu

from dmc.kernels.base import Weights
from dmc.kernels.cpu_build import load_library
from dmc.kernels.cpu_call import SUFFIXES, call

ROWS, STEP = 16, 32
"""Most rows, and the divisor of the number of channels."""
MOST_TOGETHER = 4
"""Products of one call, as `cpu.cpp` states."""
NO_PRODUCT = (None, None, 0, None)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x W^T + b; compiled for few rows, where a BLAS is slow.

    Args:
        x: [..., inputs].
        weight: [outputs, inputs].
        bias: [outputs] or None.
    """
    return linear_together(x, ((weight, bias),))[0]


def linear_together(x: Tensor, layers: Sequence[Weights]) -> list[Tensor]:
    """Compute x W^T + b of up to `MOST_TOGETHER` linear layers in one call, each as `linear`.

    Args:
        x: [..., inputs].
        layers: weights and biases.
    """
    if not (fits(x) and all(_is_like(x, layer, x.shape[-1]) for layer in layers)):
        return [torch_linear(x, *layer) for layer in layers]
    lead, inputs = x.shape[:-1], x.shape[-1]
    x = x.contiguous()
    made = [torch.empty(*lead, weight.shape[0], dtype=x.dtype) for weight, _ in layers]
    products = [
        field
        for (weight, bias), out in zip(layers, made, strict=True)
        for field in (weight, bias, weight.shape[0], out)
    ]
    unused = NO_PRODUCT * (MOST_TOGETHER - len(made))
    sizes = x.numel() // inputs, inputs, torch.get_num_threads(), len(made)
    call("linear_" + SUFFIXES[x.dtype], *sizes, x, *products, *unused)
    return made


def gated_mlp(x: Tensor, gate: Weights, up: Weights, down: Weights) -> Tensor:
    """Compute an MLP, D (silu(G x) * U x), in one call for few rows.

    Args:
        x: [..., inputs].
        gate: weight and bias of G.
        up: of U.
        down: of D.
    """
    hidden = gate[0].shape[0]
    is_compiled = fits(x) and hidden % STEP == 0 and up[0].shape[0] == hidden and _is_like(x, down, hidden)
    if not (is_compiled and _is_like(x, gate, x.shape[-1]) and _is_like(x, up, x.shape[-1])):
        return torch_linear(silu(torch_linear(x, *gate)) * torch_linear(x, *up), *down)
    lead, inputs, outputs = x.shape[:-1], x.shape[-1], down[0].shape[0]
    x, out = x.contiguous(), torch.empty(*lead, outputs, dtype=x.dtype)
    sizes = x.numel() // inputs, inputs, hidden, torch.get_num_threads()
    call("gated_mlp_" + SUFFIXES[x.dtype], *sizes, x, *gate, *up, *down, outputs, out)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last dimension, as Llama's norm does; `x` has to fit."""
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    call("rms_norm_" + SUFFIXES[x.dtype], x.numel() // x.shape[-1], x.shape[-1], float(eps), x, weight, out)
    return out


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate few queries or keys by halves, see `dmc.compression.rotate`.

    Args:
        states: [T, heads, D], channels side by side.
        cos: [T, D], channels side by side.
        sin: [T, D], with the strides of `cos`.
    Returns:
        [T, heads, D].
    """
    tokens, heads, dim = states.shape
    out = torch.empty(tokens, heads, dim, dtype=states.dtype)
    call("rotate_" + SUFFIXES[states.dtype], *states.shape, states, *states.stride()[:2], cos, sin, cos.stride(0), out)
    return out


def rotates(states: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether `rotate` takes [..., T, D] beside these tables, [..., T, D]."""
    dim = states.shape[-1]
    is_known = states.is_cpu and states.dtype in SUFFIXES and dim % STEP == 0 and states.shape[-2] <= ROWS
    alike = cos.dtype is states.dtype and sin.dtype is states.dtype and cos.stride() == sin.stride()
    return is_known and alike and cos.shape[-1] == dim and states.stride(-1) == cos.stride(-1) == 1 and _is_built()


def fits(x: Tensor) -> bool:
    """Whether compiled code takes the rows of `x`, [..., channels]."""
    channels = x.shape[-1]
    is_known = x.is_cpu and x.dtype in SUFFIXES and channels > 0 and channels % STEP == 0
    return is_known and 0 < x.numel() <= ROWS * channels and _is_built()


def _is_built() -> bool:
    return load_library() is not None


def _is_like(x: Tensor, layer: Weights, inputs: int) -> bool:
    """Whether compiled code takes a layer's weights beside `x`."""
    weight, bias = layer
    if not (weight.dtype is x.dtype and weight.is_cpu and weight.shape[1] == inputs and weight.is_contiguous()):
        return False
    return bias is None or (bias.dtype is x.dtype and bias.is_cpu and bias.is_contiguous())
