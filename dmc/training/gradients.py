"""Gradients of parameters, wherever a strategy keeps them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.utils import get_total_norm


def gradient_norm(module: nn.Module) -> Tensor:
    """Compute the norm over all gradients, unclipped and synchronised: a scalar, the same on every rank.

    With sharded gradients all ranks must call this together.
    """
    by_mesh: dict[Any, list[Tensor]] = defaultdict(list)  # tensors of different meshes cannot be stacked
    for parameter in module.parameters():
        if parameter.grad is not None:
            by_mesh[getattr(parameter.grad, "device_mesh", None)].append(parameter.grad)
    norms = [get_total_norm(gradients) for gradients in by_mesh.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    if not whole:
        return torch.zeros((), device=next(module.parameters()).device)
    return torch.linalg.vector_norm(torch.stack(whole).float())


def clip_gradients(module: nn.Module, norm: Tensor, largest: float) -> None:
    """Scale all gradients, in place, so that their norm, which is `norm`, is at most `largest`."""
    scale = (largest / (norm + 1e-6)).clamp(max=1.0)
    for parameter in module.parameters():
        if parameter.grad is not None:
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            local.mul_(scale.to(local.device))


def keep_rows(parameter: nn.Parameter, rows: slice) -> None:
    """Set a gradient to 0, in place, but for some rows, counted over all ranks that divide the parameter."""
    gradient = parameter.grad
    if gradient is None:
        return
    first = 0
    local = gradient
    if isinstance(gradient, DTensor):
        local = gradient.to_local()
        _, (first, *_) = compute_local_shape_and_global_offset(
            gradient.shape, gradient.device_mesh, gradient.placements
        )
    start, stop, step = rows.indices(gradient.shape[0])
    row = torch.arange(first, first + local.shape[0], device=local.device)
    frozen = (row < start) | (row >= stop) | ((row - start) % step != 0)
    local.masked_fill_(frozen.view(-1, *[1] * (local.dim() - 1)), 0)
