"""What an engine reads off a model, and its view of it: the same weights and hooks under other forwards."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
import torch._dynamo.config
import torch.fx.experimental._config
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from dmc.compression import CompressionConfig
from dmc.compression.full_attention import layer_windows, refuse_other_attention
from dmc.kernels.layout import CacheLayout
from dmc.kernels.recurrent import state_fields
from dmc.policies import CachePolicy
from dmc.ranks import ALONE
from dmc.runtime.paged_forward import STOCK_ATTENTION, stock_recurrent

COMPILED_VARIANTS = 64
"""Most graphs of one function in a process: each kind of layer of each model, with one sequence and with several."""
ATTENTION_FUNCTIONS = "ALL_ATTENTION_FUNCTIONS"
"""What modules of transformers import whose attention can be another function."""


def view_of(model: Any) -> Any:
    """Return a view of a model: other modules, with the same parameters, buffers and hooks, in its present mode.

    What is set on a module of the view, such as another forward, leaves the model as it is. What happens to the model's
    parameters, buffers and hooks afterwards happens to the view's.
    """
    views: dict[nn.Module, nn.Module] = {}

    def view(module: nn.Module) -> nn.Module:
        if module not in views:
            views[module] = other = object.__new__(type(module))
            states = {name: _bound_to(other, module, value) for name, value in module.__dict__.items()}
            states.pop("_compiled_call_impl", None)  # of module.compile(), which calls the model's own modules
            other.__dict__.update(states)
            other._modules = {name: None if child is None else view(child) for name, child in module._modules.items()}
        return views[module]

    return view(model)


def _bound_to(view: nn.Module, module: nn.Module, value: Any) -> Any:
    """Bind a method that was set on a module, as offloading does, to its view."""
    if isinstance(value, MethodType) and value.__self__ is module:
        return MethodType(value.__func__, view)
    if isinstance(value, functools.partial) and value.args and value.args[0] is module:
        return functools.partial(value.func, view, *value.args[1:], **value.keywords)
    return value


def use_paged_attention(view: Any) -> None:
    """Let a view of a stock model attend through the paged cache, and layers without attention keep their states there.

    No mask function is registered beside the attention function, so transformers builds no mask, whose size would be
    the square of a pass's tokens.
    """
    copied: dict[int, Any] = {}
    for module in view.modules():
        if isinstance(config := module.__dict__.get("config"), PreTrainedConfig):
            if id(config) not in copied:
                copied[id(config)] = copy.deepcopy(config)
                copied[id(config)]._attn_implementation = STOCK_ATTENTION
            module.config = copied[id(config)]
    for module in view.modules():
        if (recurrent := getattr(module, "linear_attn", None)) is not None:
            run = recurrent.__dict__.get("forward") or functools.partial(type(recurrent).forward, recurrent)
            recurrent.__dict__["forward"] = functools.partial(stock_recurrent, recurrent, run)


def compile_layers(view: nn.Module) -> None:
    """Let decoder layers of a view run compiled, around their attention, for any number of sequences.

    All layers of one kind share their graphs: attention is not part of them, and alone asks which layer it is in.
    """
    layers = decoder_layers(view)
    compiled = {kind: compiled_for_any_number(kind.forward) for kind in {type(layer) for layer in layers}}
    for layer in layers:
        if "forward" not in layer.__dict__:
            layer.__dict__["forward"] = functools.partial(compiled[type(layer)], layer)


def compiled_for_any_number(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled for one sequence, and for several, when it is first called with so many."""
    return torch.compile(function, dynamic=True)


@contextlib.contextmanager
def general_graphs() -> Iterator[None]:
    """Let graphs hold for any number of sequences, by chance that of the heads or not, and constants be constants."""
    any_size = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    with any_size, torch._dynamo.config.patch(specialize_float=True, recompile_limit=COMPILED_VARIANTS):
        yield


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return what transformers checkpoints as one: a model's decoder layers."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def is_compiled(model: nn.Module, layout: CacheLayout, wish: bool | str) -> bool:
    """Return whether decoder layers shall be compiled; see `Engine`.

    Raises:
        ValueError: they shall be and cannot.
    """
    if wish == "auto":
        return layout.device.type == "cuda" and why_not_compiled(model, layout) is None
    if wish and (reason := why_not_compiled(model, layout)) is not None:
        raise ValueError(f"compile=True: {reason}; use compile=False")
    return bool(wish)


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


def layout_of(model: Any, policy: CachePolicy | None = None) -> CacheLayout:
    """Read a cache's shape off a model; a compressed one carries its gates' configuration, a policy its fields.

    Raises:
        NotImplementedError: a stock model's attention is neither full causal attention nor a window's, or no layer has
            any.
    """
    config = model.config
    compression = getattr(config, "compression", None)
    if compression is None:
        refuse_other_attention(config)
        if not any(hasattr(sys.modules[type(part).__module__], ATTENTION_FUNCTIONS) for part in model.modules()):
            raise NotImplementedError(
                f"layer 0 of this {config.model_type} model has its own attention: expected a model that uses "
                "transformers' AttentionInterface"
            )
    parameter = next(model.parameters())
    ranks = getattr(model, "ranks", ALONE)
    num_kv_heads = config.num_key_value_heads // ranks.size
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    windows = layer_windows(config)
    if not any(window != 0 for window in windows):
        raise NotImplementedError(
            f"no layer of this {config.model_type} model has attention: expected one that keeps keys and values"
        )
    layout = CacheLayout(
        num_layers=windows.count(None),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=parameter.dtype,
        device=parameter.device,
        compression=None if compression is None else CompressionConfig.from_dict(compression),
        ranks=ranks,
        num_query_heads=config.num_attention_heads // ranks.size,
        windows=windows,
        state_fields=state_fields(config, windows.count(0), parameter.dtype),
    )
    if policy is None:
        return layout
    offloaded = policy.offloaded(layout.num_layers)
    return dataclasses.replace(layout, policy_fields=policy.fields(layout), offloaded=offloaded)


def fit_policy(
    model: Any, policy: CachePolicy, block_size: int = 16, prefill_chunk_size: int | None = None
) -> CachePolicy:
    """Return the policy with what depends on the model filled in.

    Raises:
        TypeError: it is no policy.
        ValueError: the model cannot be served with it: several processes share it, or it compresses by itself and the
            policy acts while generating, or lacks what the options name; or prompts are to be cut inside what the
            policy takes together.
    """
    if not isinstance(policy, CachePolicy):
        raise TypeError(f"policy={policy!r}: expected an object such as dmc.policies.H2O(budget=Budget(ratio=4.0))")
    if getattr(model.config, "compression", None) is not None and not policy.serves_compressed:
        raise ValueError(
            f"policy={policy!r}: the gates of {type(model).__name__} decide token by token what its cache keeps. "
            "Give a stock model, policy=None, or a policy that compresses prompts alone: SnapKV, PyramidKV, AdaKV, "
            "LAVa or AttentionMatching"
        )
    if getattr(model, "ranks", ALONE).size > 1:
        raise ValueError("a policy cannot be used with a model that several processes share: use one process")
    chunk = policy.prompt_chunk
    if chunk is not None and prefill_chunk_size is not None and prefill_chunk_size % chunk:
        raise ValueError(
            f"prefill_chunk_size={prefill_chunk_size}: {type(policy).__name__} takes {chunk} tokens of a prompt "
            f"together; give a multiple of {chunk}, or None"
        )
    num_layers = layer_windows(model.config).count(None)
    if num_layers == 0:
        raise ValueError(
            f"policy={policy!r}: all layers of this {model.config.model_type} model have a window, and keep no more "
            "than it; use policy=None"
        )
    return policy.fitted(num_layers, block_size)
