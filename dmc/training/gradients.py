"""Gradients of all parameters, wherever a strategy keeps them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm


def gradient_norm(module: LightningModule, trainer: Trainer) -> Tensor:
    """Compute the norm over all gradients, unclipped and synchronised: a scalar, the same on every rank.

    With sharded gradients all ranks must call this together.
    """
    by_mesh: dict[Any, list[Tensor]] = defaultdict(list)  # tensors of different meshes cannot be stacked
    for parameter in module.parameters():
        if parameter.grad is not None:
            by_mesh[getattr(parameter.grad, "device_mesh", None)].append(parameter.grad)
    norms = [get_total_norm(gradients) for gradients in by_mesh.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return torch.linalg.vector_norm(torch.stack(whole).float()) if whole else torch.zeros((), device=module.device)


def discard_gradients(module: LightningModule, trainer: Trainer) -> None:
    """Drop all gradients, so that the optimizer changes neither weights nor its state in this step."""
    module.zero_grad(set_to_none=True)
