"""What a training step allocates beside weights, gradients and optimizer: measured on tensors without storage.

The model's own code runs forward and backward with one and with two layers on fake tensors, which have shapes and
lifetimes but no data; what more layers need is linear in their number. Nothing is assumed about what autograd keeps.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from dmc.compression import CompressionConfig, GateMode, GateTrace, compression_loss
from dmc.measure import evaluating
from dmc.models import next_tokens, retrofit, sequence_means, with_token_losses
from dmc.training.teacher import Teacher


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations make while it is active, until each is freed.

    Args:
        known: tensors that exist already and are not counted.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._seen: set[int] = {id(tensor.untyped_storage()) for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it made."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def take_peak(self) -> int:
        """Return the highest count since the last call."""
        peak, self.peak = self.peak, self.live
        return peak

    def _count(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._seen:
            return
        self._seen.add(id(storage))
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, id(storage), storage.nbytes())

    def _free(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.live -= num_bytes


@dataclass(frozen=True)
class StepShape:
    """One micro-batch on one device."""

    batch: int
    """Sequences."""
    length: int
    """Tokens per sequence."""
    dtype: torch.dtype
    """Of the weights as the layers see them."""
    autocast: bool
    """bfloat16 autocast around the forward."""
    checkpointing: bool
    """Layers are recomputed in backward."""
    distils: bool = False
    """A frozen teacher of the model's shape reads the batch too."""


@dataclass(frozen=True)
class StepBytes:
    """Bytes beside weights, gradients and optimizer states."""

    kept: int
    """Held for the backward when the last layer's forward has ended."""
    loss: int
    """Peak until the gradient of the last layer's output is there: logits of some words, loss, and what is kept."""
    layers: int
    """Peak while gradients pass through the layers, recomputation included, with what is then still kept."""
    embedding: int
    """Peak in the embedding's backward."""
    validation: int
    """Peak of a forward without gradients, thresholded decisions."""

    def extended(self, two: StepBytes, num_layers: int) -> StepBytes:
        """Extrapolate from one layer (self) and `two` to `num_layers`."""
        return StepBytes(
            *(
                first + max(0, second - first) * (num_layers - 1)
                for first, second in zip(vars(self).values(), vars(two).values(), strict=True)
            )
        )


def trace_step(config: PretrainedConfig, compression: CompressionConfig | None, shape: StepShape) -> StepBytes:
    """Count what a forward and backward of `config`'s model allocates.

    Args:
        config: stock configuration, as one device sees it.
        compression: gates at work; None: the stock model.
        shape: the micro-batch.
    """
    one, two = (_trace_layers(config, compression, shape, count) for count in (1, 2))
    return one.extended(two, config.num_hidden_layers)


def with_values(config: PretrainedConfig, **changes: Any) -> PretrainedConfig:
    """Copy a configuration with other values."""
    values = {key: value for key, value in config.to_dict().items() if key != "layer_types"} | changes
    return AutoConfig.for_model(values.pop("model_type"), **values)


def _trace_layers(
    config: PretrainedConfig, compression: CompressionConfig | None, shape: StepShape, num_layers: int
) -> StepBytes:
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers renames the switch of checkpointing
        model_config = with_values(config, num_hidden_layers=num_layers)
        model = AutoModelForCausalLM.from_config(model_config, dtype=shape.dtype)
        if compression is not None:
            model = retrofit(model, compression)
        else:
            with_token_losses(model)
            model.model.register_forward_pre_hook(_with_mask, with_kwargs=True)
        model.train()
        if shape.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)  # as from the micro-batch before
        for layer in model.model.layers:
            layer.register_forward_pre_hook(_without_mask, with_kwargs=True)
        input_ids = torch.zeros(shape.batch, shape.length, dtype=torch.long)
        known = [*model.parameters(), *(parameter.grad for parameter in model.parameters()), *model.buffers()]
        teacher = None
        if shape.distils:
            stock = AutoModelForCausalLM.from_config(model_config, dtype=shape.dtype)
            stock.model.register_forward_pre_hook(_with_mask, with_kwargs=True)
            for layer in stock.model.layers:
                layer.register_forward_pre_hook(_without_mask, with_kwargs=True)
            teacher = Teacher(stock, "", 1.0)
            known += [*stock.parameters(), *stock.buffers()]
        live = LiveBytes(known)
        marks: dict[str, int] = {}

        def before_norm(_: Any, arguments: tuple[Tensor, ...]) -> None:
            if torch.is_grad_enabled():
                marks["kept"] = live.live
                arguments[0].register_hook(lambda _: marks.update(loss=live.take_peak()))

        def after_embedding(_: Any, __: Any, output: Tensor) -> None:
            if torch.is_grad_enabled():
                output.register_hook(lambda _: marks.update(layers=live.take_peak()))

        model.model.norm.register_forward_pre_hook(before_norm)
        model.model.embed_tokens.register_forward_hook(after_embedding)
        with live:
            with torch.autocast("cpu", torch.bfloat16, enabled=shape.autocast):
                loss = _loss(model, input_ids, teacher)
            loss.backward()
            del loss
            marks["embedding"] = live.take_peak()
            with evaluating(model), torch.autocast("cpu", torch.bfloat16, enabled=shape.autocast):
                _loss(model, input_ids)
            marks["validation"] = live.take_peak()
    return StepBytes(**{name: marks[name] for name in StepBytes.__dataclass_fields__})


def _without_mask(_: Any, arguments: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Take away the mask: causal attention needs none."""
    return arguments, options | {"attention_mask": None}


def _with_mask(_: Any, arguments: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give a stock model a mask: without, transformers makes one of T x T where it cannot look into the tensors."""
    return arguments, options | {"attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)}


def _loss(model: Any, input_ids: Tensor, teacher: Teacher | None = None) -> Tensor:
    has_gates = hasattr(model, "compression")
    trace = GateTrace()
    gates = {"gate_mode": GateMode(noise_seeds=list(range(len(input_ids)))) if model.training else None}
    targets, taught = next_tokens(input_ids), None if teacher is None else teacher.read(input_ids)
    options = gates | {"gate_trace": trace} if has_gates else {}
    losses = model(input_ids, use_cache=False, targets=targets, taught=taught, **options)
    loss = sequence_means(losses.cross_entropy, targets).mean()
    if taught is not None:
        loss = 0.5 * loss + 0.5 * sequence_means(losses.divergence, targets).mean()
    if has_gates:
        loss = loss + compression_loss(trace.stacked_alpha(), 4.0, delay=model.compression.delay)
    return loss
