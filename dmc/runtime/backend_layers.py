"""A view of a model whose layers call the backend where it has a faster way for the few rows of a decode step.

Layers like Llama's run in one call where a pass only decodes. In all others linear layers of the same input share a
call, and norms, gated MLPs and rotations like Llama's take one each. Weights stay where they are; hooks run as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from transformers.models.llama import modeling_llama as llama

from dmc.runtime.layer_code import ROTARY, has_code, is_linear, is_llama_mlp, rotates_as_llama, weights_of
from dmc.runtime.whole_layers import LayerRun, is_whole

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers of a module that are given the same input, in the order of their calls."""


def use_backend_layers(view: nn.Module, backend: ModuleType) -> None:
    """Let layers of a view call the backend, if it has functions for them.

    A layer with a `forward` of its own, as offloading and adapters set one, is left alone.

    Args:
        view: see `view_of`.
        backend: of kernels.
    """
    if not hasattr(backend, "linear_together"):
        return
    whole = [module for module in view.modules() if is_whole(module)]
    for layer in whole:
        layer.__dict__["forward"] = LayerRun(backend, layer)
    for module in view.modules():
        for names in TOGETHER:
            linears = [module._modules[name] for name in names if is_linear(module._modules.get(name))]
            if len(linears) > 1:
                _call_together(linears, backend)
        if has_code(module, llama.LlamaRMSNorm.forward):
            module.__dict__["forward"] = functools.partial(_normalize, backend, module)
        elif is_llama_mlp(module):
            module.__dict__["forward"] = functools.partial(_run_mlp, backend, module)
        elif (forward := _forward_with_rotary(module, backend)) is not None:
            module.__dict__["forward"] = functools.partial(forward, module)
    for module in view.modules():
        if is_linear(module):
            module.__dict__["forward"] = functools.partial(_multiply, backend.linear, module)
        elif "forward" not in module.__dict__ and getattr(module, "is_linear_without_targets", False):
            module.__dict__["forward"] = functools.partial(_multiply_unless_asked_more, backend.linear, module)


def _multiply(linear: Any, module: Any, states: Tensor) -> Tensor:
    return linear(states, module._parameters["weight"], module._parameters["bias"])  # type: ignore[no-any-return]


def _multiply_unless_asked_more(linear: Any, module: Any, states: Tensor, *given: Any, **named: Any) -> Any:
    return (
        type(module).forward(module, states, *given, **named) if given or named else _multiply(linear, module, states)
    )


def _normalize(backend: Any, norm: Any, states: Tensor) -> Tensor:
    weight = norm._parameters["weight"]
    if backend.fits(states) and weight.dtype is states.dtype and weight.is_cpu:
        return backend.rms_norm(states, weight, norm.variance_epsilon)  # type: ignore[no-any-return]
    return type(norm).forward(norm, states)  # type: ignore[no-any-return]


def _run_mlp(backend: Any, mlp: Any, states: Tensor) -> Tensor:
    """Run an MLP in one call, unless its layers are others by now, or watched."""
    layers = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    if not backend.fits(states) or any(map(_is_watched, (*layers, mlp.act_fn))):
        return type(mlp).forward(mlp, states)  # type: ignore[no-any-return]
    return backend.gated_mlp(states, *map(weights_of, layers))  # type: ignore[no-any-return]


def _is_watched(module: nn.Module) -> bool:
    """Whether a call of the module does more than its forward."""
    given = module.__dict__
    return bool(given["_forward_hooks"] or given["_forward_pre_hooks"])


def _call_together(linears: Sequence[Any], backend: Any) -> None:
    """Let the first of some linear layers compute all of them, and the others hand out what it has computed."""
    group = _Together(linears, backend)
    for index, linear in enumerate(linears):
        linear.__dict__["forward"] = functools.partial(group.run, index)


def _version_of(states: Tensor) -> int:
    """Count the changes of a tensor in place; 0 in inference mode, which does not count them."""
    return 0 if states.is_inference() else states._version


class _Together:
    """Linear layers that are called one after the other on the same states.

    A layer that is given other states, as by a hook that changes them, computes them alone.

    Args:
        linears: in the order of their calls.
        backend: of kernels.
    """

    def __init__(self, linears: Sequence[Any], backend: Any) -> None:
        self._linears, self._backend = linears, backend
        self._states: Tensor | None = None
        self._version = 0
        self._found: list[Tensor | None] = []

    def run(self, index: int, states: Tensor) -> Tensor:
        """Return the output of a layer, [..., outputs], for states, [..., inputs]."""
        if index == 0 and self._backend.fits(states):
            first, *self._found = self._backend.linear_together(
                states, [weights_of(linear) for linear in self._linears]
            )
            self._states, self._version = states, _version_of(states)
            return first
        found = None
        if states is self._states and _version_of(states) == self._version:
            found, self._found[index - 1] = self._found[index - 1], None
        if index == len(self._linears) - 1:
            self._states, self._found = None, []
        return _multiply(self._backend.linear, self._linears[index], states) if found is None else found


def _forward_with_rotary(module: nn.Module, backend: Any) -> Callable[..., Any] | None:
    """Return an attention layer's forward, with the backend's rotation if the family's is Llama's; else None."""
    forward = type(module).forward
    if "forward" in module.__dict__ or not isinstance(forward, FunctionType) or ROTARY not in forward.__code__.co_names:
        return None
    if not rotates_as_llama(module):
        return None
    theirs = forward.__globals__
    rotary = functools.partial(_rotate, backend, theirs[ROTARY])
    other = FunctionType(
        forward.__code__, {**theirs, ROTARY: rotary}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    other.__kwdefaults__ = forward.__kwdefaults__
    return other


def _rotate(
    backend: Any, stock: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, [1, heads, T, D], as a family's `apply_rotary_pos_emb` does; cos and sin [1, T, D]."""
    if unsqueeze_dim != 1 or len(query) != 1 or not backend.rotates(query, cos, sin):
        return stock(query, key, cos, sin, unsqueeze_dim=unsqueeze_dim)  # type: ignore[no-any-return]
    query, key = (
        backend.rotate(states[0].transpose(0, 1), cos[0], sin[0]).transpose(0, 1)[None] for states in (query, key)
    )
    return query, key
