"""What a module computes, read off the code of its forward: a family whose code is Llama's is Llama's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama as llama

ROTARY = "apply_rotary_pos_emb"
"""Function of a family's module that rotates queries and keys."""


@functools.cache
def same_code(one: Any, other: Any) -> bool:
    """Whether two functions do the same to the same names, behind any decorators."""
    codes: list[Any] = [getattr(inspect.unwrap(function), "__code__", None) for function in (one, other)]
    return None not in codes and _said(codes[0]) == _said(codes[1])


def _said(code: CodeType) -> tuple[Any, ...]:
    constants = [value for value in code.co_consts if not isinstance(value, str)]  # without the docstring
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


def has_code(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether a module, without a `forward` of its own, runs the same code as another class's `forward`."""
    return "forward" not in module.__dict__ and same_code(type(module).forward, forward)


def is_linear(module: Any) -> bool:
    """Whether a module does what `nn.Linear` does."""
    return isinstance(module, nn.Linear) and has_code(module, nn.Linear.forward)


def is_llama_mlp(module: nn.Module) -> bool:
    """Whether a module is a gated MLP with SiLU."""
    if not has_code(module, llama.LlamaMLP.forward) or not isinstance(module.act_fn, nn.SiLU | SiLUActivation):
        return False
    return all(map(is_linear, (module.gate_proj, module.up_proj, module.down_proj)))  # not those whose ranks add up


def rotates_as_llama(attention: nn.Module) -> bool:
    """Whether a stock layer rotates its queries and keys by the same code as Llama."""
    theirs, names = getattr(type(attention).forward, "__globals__", {}), vars(llama)
    return all(same_code(theirs.get(name), names[name]) for name in (ROTARY, "rotate_half"))


def weights_of(linear: Any) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a linear layer."""
    return linear._parameters["weight"], linear._parameters["bias"]
