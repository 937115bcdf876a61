"""Linear layers of a model that is served by a backend with a faster product for few rows."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


def use_linear_of(backend: ModuleType, model: nn.Module) -> None:
    """Let the model's linear layers ask `backend.linear`, if it has one, wherever no gradient is wanted.

    Their parameters, and what they compute, stay as they are.
    """
    linear = getattr(backend, "linear", None)
    if linear is None:
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = functools.partial(_forward, linear, module)  # type: ignore[method-assign]


def _forward(linear: Any, module: nn.Linear, states: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        return nn.functional.linear(states, module.weight, module.bias)
    return linear(states, module.weight, module.bias)
