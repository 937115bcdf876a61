"""Weights, gradients and optimizer state sharded over the ranks by PyTorch's `fully_shard`, with tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, load
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from dmc.config import RunConfig
from dmc.models.adapter import GateAdapter
from dmc.models.build import assemble
from dmc.models.gqa import merge_rows
from dmc.models.tensor_parallel import check_divides
from dmc.models.weights import empty_model, local_folder, stored_shapes, weight_files
from dmc.ranks import Ranks
from dmc.training.checkpoints.folder import CheckpointFolders
from dmc.training.strategies.whole import WholeModel

HEADS = 2
"""Dimension of the heads in projected queries and keys, [B, T, H, D]."""


class Fsdp2(WholeModel):
    """FSDP2: each decoder layer is gathered for its own forward and backward pass only.

    In bf16-mixed the gathered copies and the gradients on their way are bfloat16, the shards, the sums of gradients
    and the optimizer float32.

    Raises:
        ValueError: heads or neurons cannot be divided among the tensor parallel ranks.
    """

    format = "fsdp2"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.precision = "32-true"  # what is bfloat16 is said by the policy of `fully_shard`, not by autocast

    def lightning_strategy(self) -> Any:
        """See `WholeModel`."""
        return Fsdp2Strategy(self.config.trainer.tensor_parallel_size)

    def load(self) -> Any:
        """See `WholeModel`: no rank ever holds the whole model."""
        settings = self.config.model
        return self.with_merged_heads(empty_model(settings.path, getattr(torch, settings.dtype), settings.revision))

    def spread(self, module: LightningModule) -> None:
        """Cut the heads, then shard each decoder layer, then the rest."""
        self._shard(module.model, str(self.config.model.path), module)

    def load_teacher(self, path: str) -> Any:
        """See `WholeModel`: no rank ever holds the whole model."""
        return empty_model(path, getattr(torch, self.config.model.dtype), self.revision_of(path))

    def spread_teacher(self, model: Any, path: str, module: LightningModule) -> None:
        """Shard it as the model."""
        self._shard(model, path, module)

    def _shard(self, model: Any, path: str, module: LightningModule) -> None:
        mesh = module.device_mesh
        assert mesh is not None
        if mesh["tensor_parallel"].size() > 1:
            cut_heads(model, mesh["tensor_parallel"])
        policy = MixedPrecisionPolicy()
        if self.config.trainer.precision == "bf16-mixed":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options: dict[str, Any] = {"mesh": mesh["data_parallel"], "mp_policy": policy}
        for layer in model.model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        if next(model.parameters()).is_meta:
            self._read_shards(model, path, module.trainer.strategy.root_device)

    def _read_shards(self, model: Any, path: str, device: torch.device) -> None:
        """Read each rank's part of stored weights."""
        folder = local_folder(path, self.revision_of(path))
        model.to_empty(device=device)
        model.tie_weights()
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
        stored = stored_shapes(folder)
        state: dict[str, Any] = {name: value for name, value in get_model_state_dict(model).items() if name in stored}
        merged = {name for name, value in state.items() if tuple(value.shape) != stored[name]}
        parts = {name: value for name, value in state.items() if name not in merged}
        load(parts, storage_reader=HuggingFaceStorageReader(str(folder)))
        for file in weight_files(folder) if merged else ():
            with safe_open(file, framework="pt") as tensors:
                for name in merged.intersection(tensors.keys()):
                    parameter, head_dim = model.get_parameter(name), model.model.layers[0].self_attn.head_dim
                    weight = tensors.get_tensor(name).to(device, parameter.dtype)
                    _set_whole(parameter, merge_rows(weight, parameter.shape[0], head_dim))
        for name, part in model.named_modules():
            if isinstance(part, GateAdapter) and f"{name}.weight" not in stored:
                part.reset_parameters()

    def set_rows(self, parameter: nn.Parameter, rows: slice, values: Tensor | float) -> None:
        """See `WholeModel`."""
        whole = _whole(parameter)
        whole[rows] = torch.as_tensor(values).to(whole)
        _set_whole(parameter, whole)

    def gather(self, model: Any) -> Any:
        """See `WholeModel`."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: dict[str, Any] = get_model_state_dict(model, options=options)
        return assemble(model.config, state) if torch.distributed.get_rank() == 0 else None


def _whole(parameter: nn.Parameter) -> Tensor:
    """Gather a sharded parameter on every rank."""
    state: dict[str, Any] = get_model_state_dict(_holder(parameter), options=StateDictOptions(full_state_dict=True))
    return state["weight"]


def _set_whole(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a sharded parameter a value that every rank has whole."""
    set_model_state_dict(_holder(parameter), {"weight": value}, options=StateDictOptions(full_state_dict=True))


def _holder(parameter: nn.Parameter) -> nn.Module:
    holder = nn.Module()
    holder.weight = parameter
    return holder


class Fsdp2Strategy(ModelParallelStrategy):
    """Lightning's strategy, with the mesh from the number of ranks and checkpoints that are never torn.

    Args:
        num_cuts: tensor parallel size.
    Raises:
        ValueError: the ranks are no multiple of it.
    """

    def __init__(self, num_cuts: int) -> None:
        super().__init__(tensor_parallel_size=num_cuts, save_distributed_checkpoint=True)
        self.num_cuts, self._folders = num_cuts, CheckpointFolders("fsdp2")

    def setup_environment(self) -> None:
        """Divide the ranks among data and tensor parallelism."""
        num_ranks = self.num_nodes * self.num_processes
        if num_ranks % self.num_cuts:
            raise ValueError(
                f"trainer.tensor_parallel_size={self.num_cuts} does not divide the {num_ranks} devices of the run"
            )
        self._data_parallel_size = num_ranks // self.num_cuts
        super().setup_environment()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write each rank's shards."""
        self._folders.save(self, checkpoint, filepath, super().save_checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of any number of ranks."""
        folder = Path(checkpoint_path)
        self._folders.check(self, folder)
        checkpoint = super().load_checkpoint(folder, weights_only)
        self._folders.generations.known(folder)
        return checkpoint


def cut_heads(model: Any, mesh: DeviceMesh) -> None:
    """Divide the heads and the MLP's neurons among the ranks of `mesh`, as transformers' own plan for the model says.

    Raises:
        ValueError: they cannot be divided evenly.
    """
    ranks = Ranks(mesh.get_local_rank(), mesh.size(), mesh.get_group())
    check_divides(model.config, ranks.size)
    styles: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=HEADS, use_local_output=True),
    }
    for pattern, name in model.config.base_model_tp_plan.items():
        if name in styles:
            parallelize_module(model.model, mesh, {pattern: styles[name]})
    model.ranks = ranks
