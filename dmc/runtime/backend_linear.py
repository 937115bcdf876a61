"""Replaces a model's linear layers, during a pass, by a backend's product that is faster for few rows."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from torch import Tensor, nn


class BackendLinear:
    """Lets a model's linear layers call `backend.linear`, if it has one, while a pass runs; restores them after it.

    Their parameters and results do not change. A layer with a `forward` of its own, as offloading and adapters set
    one, is left alone.

    Args:
        backend: kernel module.
        model: the model, with its present layers.
    """

    def __init__(self, backend: ModuleType, model: nn.Module) -> None:
        linear = getattr(backend, "linear", None)
        self._layers = [module for module in model.modules() if linear is not None and type(module) is nn.Linear]
        self._forwards = [functools.partial(_forward, linear, layer) for layer in self._layers]
        self._lent: list[nn.Module] = []

    def __enter__(self) -> None:
        for layer, forward in zip(self._layers, self._forwards, strict=True):
            if "forward" not in layer.__dict__:
                layer.__dict__["forward"] = forward
                self._lent.append(layer)

    def __exit__(self, *_: object) -> None:
        while self._lent:
            del self._lent.pop().__dict__["forward"]


def _forward(linear: Any, module: nn.Linear, states: Tensor) -> Tensor:
    return linear(states, module.weight, module.bias)
