"""Lends modules of a model other forwards while a pass runs: a backend's linear product, or compiled layers."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch._dynamo.config
import torch.fx.experimental._config
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

COMPILED_VARIANTS = 64
"""Most graphs of one function in a process: each kind of layer of each model, with one sequence and with several."""


class LentForwards:
    """Lets modules call other functions in place of their forward, within a `with`; restores them after it.

    A module with a `forward` of its own, as offloading and adapters set one, is left alone.

    Args:
        forwards: what the modules call.
        setting: makes what is entered and left with this.
    """

    def __init__(
        self,
        forwards: dict[nn.Module, Callable[..., Any]],
        setting: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self._forwards, self._setting, self._settings = forwards, setting, contextlib.ExitStack()
        self._lent: list[nn.Module] = []

    def __enter__(self) -> None:
        self._settings.enter_context(self._setting())
        for module, forward in self._forwards.items():
            if "forward" not in module.__dict__:
                module.__dict__["forward"] = forward
                self._lent.append(module)

    def __exit__(self, *_: object) -> None:
        while self._lent:
            del self._lent.pop().__dict__["forward"]
        self._settings.close()


def backend_linears(backend: ModuleType, model: nn.Module) -> LentForwards:
    """Let linear layers call `backend.linear`, if it has one, which is faster for few rows."""
    linear = getattr(backend, "linear", None)
    layers = [module for module in model.modules() if linear is not None and type(module) is nn.Linear]
    return LentForwards({layer: functools.partial(_multiply, linear, layer) for layer in layers})


def _multiply(linear: Any, module: nn.Linear, states: Tensor) -> Tensor:
    return linear(states, module.weight, module.bias)


def compiled_layers(model: nn.Module) -> LentForwards:
    """Let decoder layers run compiled, around their attention, for any number of sequences.

    All layers of one kind share their graphs: attention is not part of them, and alone asks which layer it is in.
    """
    layers = decoder_layers(model)
    compiled = {kind: compiled_for_any_number(kind.forward) for kind in {type(layer) for layer in layers}}
    forwards: dict[nn.Module, Callable[..., Any]] = {
        layer: functools.partial(compiled[type(layer)], layer) for layer in layers
    }
    return LentForwards(forwards, _general_graphs)


def compiled_for_any_number(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled for one sequence, and for several, when it is first called with so many."""
    options: dict[str, Any] = {"dynamic": True, "recompile_limit": COMPILED_VARIANTS}
    return torch.compile(function, **options)


@contextlib.contextmanager
def _general_graphs() -> Iterator[None]:
    """Let graphs hold for any number of sequences, by chance that of the heads or not, and constants be constants."""
    any_size = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    with any_size, torch._dynamo.config.patch(specialize_float=True):
        yield


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return what transformers checkpoints as one: a model's decoder layers."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def why_not_compiled(model: nn.Module, layout: Any) -> str | None:
    """Say why a model's decoder layers cannot be compiled here, or None."""
    if not decoder_layers(model):
        return f"{type(model).__name__} has no decoder layers as transformers makes them"
    if layout.ranks.size > 1:
        return "several processes share the model"
    if layout.device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler  # takes seconds to import

        try:
            get_cpp_compiler()
        except RuntimeError:
            return "torch.compile needs a C++ compiler (CXX, or g++) for a model on the CPU, and finds none"
    elif layout.device.type != "cuda":
        return f"the model is on {layout.device}"
    elif importlib.util.find_spec("triton") is None:
        return "torch.compile needs triton for a model on a GPU: pip install triton"
    return None
