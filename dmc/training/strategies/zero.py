"""Optimizer state (ZeRO-1), gradients too (ZeRO-2), weights too (ZeRO-3) divided among the ranks by DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.zero import GatheredParameters, Init
from deepspeed.utils import (
    lazy_init_hp_params_optimizer_state,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from lightning import LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from typing_extensions import override

from dmc.models.adapter import GateAdapter
from dmc.models.build import fill_buffers
from dmc.models.gqa import merge_rows
from dmc.models.recurrent import attention_layers
from dmc.models.weights import local_folder, open_weights, refuse_nonfinite
from dmc.training.checkpoints import OPTIMIZER, WEIGHTS, weights_of
from dmc.training.config import RunConfig
from dmc.training.strategies.parallelism import Parallelism, no_states

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's states of each weight beside its counter of steps."""
FLAT_WEIGHTS = {
    "fp32_partitioned_groups_flat": None,
    "single_partition_of_fp32_groups": "bit16_groups",
    "fp32_groups_flat_partition": "bf16_groups",
}
"""Where DeepSpeed's optimizers keep this rank's float32 weights, and the parameters that share each with its states: of
ZeRO-3, which needs no link between them, of ZeRO-1 and 2, and of ZeRO-1 in bfloat16."""


class ZeroStrategy(Parallelism, DeepSpeedStrategy):
    """DeepSpeed's ZeRO; weights and gradients are bfloat16 in bf16-mixed, the optimizer's copy is float32.

    DeepSpeed's own activation checkpointing is never used: it is reentrant, and would count decisions twice.
    """

    clips_in_optimizer = True
    exports_parts = True

    def __init__(self, config: RunConfig, **options: Any) -> None:
        trainer = config.trainer
        self.zero_stage = int(trainer.strategy[-1])
        DeepSpeedStrategy.__init__(
            self,
            stage=self.zero_stage,
            offload_optimizer=trainer.offload_optimizer,
            offload_parameters=trainer.offload_parameters,
            pin_memory=trainer.offload_optimizer and torch.cuda.is_available(),
            logging_batch_size_per_gpu=config.training.micro_batch_size,
            **options,
        )
        Parallelism.__init__(self, config)
        self.holds_parts = self.zero_stage == 3
        assert isinstance(self.config, dict)  # DeepSpeed's
        self.config["gradient_clipping"] = config.training.gradient_clip or 0.0
        self.config["zero_force_ds_cpu_optimizer"] = False  # torch's fused AdamW needs no compiler
        self.config["data_types"] = {"grad_accum_dtype": "fp32"}  # many micro-batches vanish in a bfloat16 sum

    def parallelize(self, model: Any, path: str) -> None:
        """Read and shard one layer after the other; a model with weights is sharded by the engine."""
        if not next(model.parameters()).is_meta:
            return
        folder = local_folder(path, self.revision_of(path))
        stored = open_weights(folder)
        head_dim = attention_layers(model)[0].head_dim
        for name, part in reversed(list(model.named_modules())):  # DeepSpeed takes a part with all that is in it
            for key, parameter in list(part.named_parameters(recurse=False)):
                weight = f"{name}.{key}"
                if weight in stored:
                    value = stored[weight][:].to(self.root_device, parameter.dtype)
                    refuse_nonfinite([(weight, value)], path)
                    setattr(part, key, nn.Parameter(merge_rows(value, parameter.shape[0], head_dim)))
            for key, buffer in list(part.named_buffers(recurse=False)):
                if f"{name}.{key}" in stored:
                    setattr(part, key, stored[f"{name}.{key}"][:].to(self.root_device, buffer.dtype))
            if isinstance(part, GateAdapter) and f"{name}.weight" not in stored:
                part.to_empty(device=self.root_device)
                part.reset_parameters()
            if (first := next(part.parameters(recurse=False), None)) is not None and not first.is_meta:
                Init(module=part, config_dict_or_path=self.config)
        model.tie_weights()
        fill_buffers(model, self.root_device)

    @override
    def parallelize_teacher(self, model: Any, path: str) -> None:
        model.to(self.root_device)
        if self.precision == "bf16-mixed":
            model.to(torch.bfloat16)
            fill_buffers(model, model.device)

    @override
    def set_rows(self, parameter: nn.Parameter, rows: slice, values: Tensor | float) -> None:
        master = safe_get_full_fp32_param(parameter)  # DeepSpeed copies these over the weights after each step
        master[rows] = torch.as_tensor(values).to(master)
        self._set_master(parameter, master)
        with GatheredParameters([parameter], modifier_rank=0, enabled=self.zero_stage == 3):
            parameter.data[rows] = torch.as_tensor(values).to(parameter)

    @override
    def gradient_norm(self, module: LightningModule) -> Tensor:
        engine: Any = module.trainer.model
        return torch.tensor(float(engine.get_global_grad_norm()) if engine.was_step_applied() else torch.inf)

    def weights(self, model: Any) -> dict[str, Any]:
        """See `Parallelism`: rows of the optimizer's float32 weights, not of the copies of bf16-mixed."""
        return {name: self._local_rows(safe_get_full_fp32_param(weight)) for name, weight in weights_of(model).items()}

    def init_deepspeed(self) -> None:
        """Make the engine; RoPE's frequencies stay float32 whatever DeepSpeed casts."""
        model = self.lightning_module
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
        super().init_deepspeed()
        for name, buffer in model.named_buffers():
            if name in buffers:
                buffer.data = buffers[name].to(buffer.device)
        self._zero.check_grad_overflow = True  # by itself DeepSpeed does not look in float32

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **options: Any) -> Tensor:
        """Make the gradient of a loss that is not finite so too: DeepSpeed skips a step by its gradient alone."""
        return super().backward(closure_loss * (1 + 0 * closure_loss.detach()), optimizer, *args, **options)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Sum gradients of micro-batches that are not the last of their step."""
        engine: Any = self.deepspeed_engine
        engine.set_gradient_accumulation_boundary(False)
        yield
        engine.set_gradient_accumulation_boundary(True)

    def tensors(self) -> dict[str, Any]:
        """See `Parallelism`: of each weight and state some rows, which DeepSpeed gathers for it one by one."""
        states = self._states()
        flat_weights, groups = self._flat_weights()
        if groups is not None and states:  # by itself DeepSpeed links them once the first group has some
            for parameters, weight in zip(groups, flat_weights, strict=True):
                lazy_init_hp_params_optimizer_state(parameters, weight, self._zero.optimizer.state)
        model = self.lightning_module.model
        tensors = {f"{WEIGHTS}{name}": rows for name, rows in self.weights(model).items()}
        for name, parameter in weights_of(model).items():
            for key in MOMENTS if states else ():
                tensors[f"{OPTIMIZER}{name}.{key}"] = self._local_rows(safe_get_full_optimizer_state(parameter, key))
            tensors |= {f"{OPTIMIZER}{name}.step": state["step"].to("cpu", copy=True) for state in states[:1]}
        return tensors

    @override
    def set_tensors(self, read: Callable[[dict[str, Any]], None]) -> None:
        for weight in self._flat_weights()[0]:
            self._zero.optimizer.state[weight] = no_states(weight.detach())
        tensors = self.tensors()
        read(tensors)
        names = weights_of(self.lightning_module.model)
        for name, parameter in names.items():
            self.set_rows(parameter, slice(None), _full_tensor(tensors[f"{WEIGHTS}{name}"]))
            for key in MOMENTS:
                self._set_master(parameter, _full_tensor(tensors[f"{OPTIMIZER}{name}.{key}"]), key)
        for state in self._states():
            state["step"].copy_(max(tensors[f"{OPTIMIZER}{name}.step"] for name in names))

    @property
    def _zero(self) -> Any:
        """DeepSpeed's optimizer around AdamW."""
        engine: Any = self.deepspeed_engine
        return engine.optimizer

    def _states(self) -> list[dict[str, Tensor]]:
        """Return AdamW's states, of flat weights; none before the first step."""
        return list(self._zero.optimizer.state.values())

    def _flat_weights(self) -> tuple[list[Tensor], list[list[Tensor]] | None]:
        """Return this rank's flat float32 weights, and the parameters of each; None where DeepSpeed links none."""
        name = next(name for name in FLAT_WEIGHTS if hasattr(self._zero, name))
        groups = FLAT_WEIGHTS[name]
        return getattr(self._zero, name), None if groups is None else getattr(self._zero, groups)

    def _local_rows(self, full: Tensor) -> Tensor:
        """Keep this rank's rows of a tensor in CPU memory, as a DTensor; a single rank keeps all of it."""
        ranks = self.writers
        if ranks.size == 1:
            return full.to("cpu", copy=True)
        parts = full.chunk(ranks.size)
        local = (parts[ranks.rank] if ranks.rank < len(parts) else full[:0]).to("cpu", copy=True)
        mesh = DeviceMesh.from_group(ranks.group, "cpu")
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())

    def _set_master(self, parameter: Any, full: Tensor, key: str | None = None) -> None:
        """Set this rank's part of the optimizer's float32 weight, or of a state of it."""
        full = full.to(self.root_device, torch.float32)
        if self.zero_stage == 3:  # DeepSpeed itself cuts without the padding
            size = safe_get_local_fp32_param(parameter).numel()
            full = nn.functional.pad(full.flatten(), (0, size * self.world_size - full.numel()))
            part = full[size * self.global_rank :][:size]
            if key is None:
                safe_set_local_fp32_param(parameter, part)
            else:
                safe_set_local_optimizer_state(parameter, part, key)
        elif key is None:
            safe_set_full_fp32_param(parameter, full)
        else:
            safe_set_full_optimizer_state(parameter, full, key)


def _full_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
