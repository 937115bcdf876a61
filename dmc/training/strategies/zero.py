"""Optimizer state (ZeRO-1), gradients too (ZeRO-2), weights too (ZeRO-3) divided among the ranks by DeepSpeed."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.zero import GatheredParameters, Init
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from lightning import LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy
from safetensors import safe_open
from torch import Tensor, nn

from dmc.config import RunConfig
from dmc.models.adapter import GateAdapter
from dmc.models.build import assemble
from dmc.models.gqa import merge_rows
from dmc.models.weights import local_folder, read_header, weight_files
from dmc.training.checkpoints.folder import TAG, Header
from dmc.training.strategies.parallelism import Parallelism


class ZeroStrategy(Parallelism, DeepSpeedStrategy):
    """DeepSpeed's ZeRO; weights and gradients are bfloat16 in bf16-mixed, the optimizer's copy is float32.

    DeepSpeed's own activation checkpointing is never used: it is reentrant, and would count decisions twice. Its
    checkpoints resume at any number of ranks.
    """

    clips_in_optimizer = True

    def __init__(self, config: RunConfig, **options: Any) -> None:
        trainer = config.trainer
        self.format, self.zero_stage = trainer.strategy, int(trainer.strategy[-1])
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
        self.config["zero_force_ds_cpu_optimizer"] = False  # torch's fused AdamW needs no compiler
        self.config["data_types"] = {"grad_accum_dtype": "fp32"}  # many micro-batches vanish in a bfloat16 sum

    def load_teacher(self, path: str) -> Any:
        """See `Parallelism`: whole on each rank, for DeepSpeed's engine holds one model only."""
        return self._load(path, whole=True)

    def parallelize(self, model: Any, path: str) -> None:
        """Read and shard one layer after the other; a model with weights is sharded by the engine."""
        if not next(model.parameters()).is_meta:
            return
        folder = local_folder(path, self.revision_of(path))
        owners = {name: file for file in weight_files(folder) for name in read_header(file)}
        head_dim = model.model.layers[0].self_attn.head_dim
        for name, part in list(model.named_modules()):
            for key, parameter in list(part.named_parameters(recurse=False)):
                weight = f"{name}.{key}"
                if weight in owners:
                    with safe_open(owners[weight], framework="pt") as tensors:
                        value = tensors.get_tensor(weight).to(self.root_device, parameter.dtype)
                    setattr(part, key, nn.Parameter(merge_rows(value, parameter.shape[0], head_dim)))
            if isinstance(part, GateAdapter) and f"{name}.weight" not in owners:
                part.to_empty(device=self.root_device)
                part.reset_parameters()
            if next(part.parameters(recurse=False), None) is not None and not part.weight.is_meta:
                Init(module=part, config_dict_or_path=self.config)
        model.tie_weights()
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(self.root_device)

    def parallelize_teacher(self, model: Any, path: str) -> None:
        """See `Parallelism`."""
        model.to(self.root_device)
        if self.precision == "bf16-mixed":
            model.to(torch.bfloat16)
            model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(model.device)

    def set_rows(self, parameter: nn.Parameter, rows: slice, values: Tensor | float) -> None:
        """See `Parallelism`."""
        master = safe_get_full_fp32_param(parameter)  # DeepSpeed copies these over the weights after each step
        if master is not None:
            master[rows] = torch.as_tensor(values).to(master)
            safe_set_full_fp32_param(parameter, master)
        with GatheredParameters([parameter], modifier_rank=0, enabled=self.zero_stage == 3):
            parameter.data[rows] = torch.as_tensor(values).to(parameter)

    def gradient_norm(self, module: LightningModule) -> Tensor:
        """See `Parallelism`."""
        engine: Any = module.trainer.model
        return torch.tensor(torch.inf if engine.optimizer.overflow else float(engine.get_global_grad_norm()))

    def gather(self, model: Any) -> Any:
        """See `Parallelism`: the optimizer's float32 weights, not the copies of bf16-mixed."""
        state = {}
        for name, parameter in model.state_dict(keep_vars=True).items():
            master = safe_get_full_fp32_param(parameter)
            with GatheredParameters([parameter], enabled=self.zero_stage == 3 and master is None):
                if torch.distributed.get_rank() == 0:
                    state[name] = (parameter if master is None else master).detach().cpu().clone()
        return assemble(model.config, state) if torch.distributed.get_rank() == 0 else None

    def _setup_model_and_optimizer(self, model: nn.Module, *arguments: Any, **options: Any) -> Any:
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
        engine_and_optimizer = super()._setup_model_and_optimizer(model, *arguments, **options)
        for name, buffer in model.named_buffers():
            if name in buffers:  # RoPE's frequencies stay float32 whatever DeepSpeed casts
                buffer.data = buffers[name].to(buffer.device)
        engine_and_optimizer[0].optimizer.check_grad_overflow = True  # by itself DeepSpeed looks in float16 only
        return engine_and_optimizer

    def backward(self, closure_loss: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Leave the loss as Lightning has divided it by the accumulated micro-batches: DeepSpeed would do so again."""
        return super().backward(closure_loss, *arguments, **options, scale_wrt_gas=False)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write each rank's shards."""
        assert self.lightning_module is not None
        header = Header.of(self.format, checkpoint, self.lightning_module.model)
        write = super().save_checkpoint
        self.saver.save(Path(filepath), header, lambda folder: write(checkpoint, folder))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of any number of ranks, see `check_saved`."""
        folder = Path(checkpoint_path)
        header = self.check_saved(folder)
        if header.num_ranks == self.world_size:
            checkpoint = super().load_checkpoint(folder, weights_only)
        else:
            checkpoint = self._load_resharded(folder)
        self.saver.rotation.mark_valid(folder)
        return checkpoint

    def _load_resharded(self, folder: Path) -> dict[str, Any]:
        """Let DeepSpeed convert a checkpoint to its form without ranks, read that, and remove it."""
        universal = folder.with_name(f"{folder.name}.universal")
        if self.is_global_zero:
            shutil.rmtree(universal, ignore_errors=True)
            options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
            ds_to_universal.main(
                argparse.Namespace(
                    input_folder=str(folder / TAG),
                    output_folder=str(universal / TAG),
                    inject_missing_state=True,
                    **options,
                )
            )
        self.barrier()
        engine, optimizer = self.deepspeed_engine, self.optimizers[0]
        decays = [group["weight_decay"] for group in optimizer.param_groups]
        engine._config.load_universal_checkpoint = True
        _, checkpoint = engine.load_checkpoint(str(universal), tag=TAG, load_lr_scheduler_states=False)
        engine._config.load_universal_checkpoint = False
        # DeepSpeed gives all parameters the settings of the first group, and one counter of steps to share.
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        for state in engine.basic_optimizer.state.values():
            state["step"] = state["step"].clone()
        self.barrier()
        if self.is_global_zero:
            shutil.rmtree(universal)
        return checkpoint
