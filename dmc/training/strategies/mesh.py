"""One mesh of devices, (replicate, shard, tensor): one device, data parallelism, FSDP2, HSDP, tensor parallelism.

Context parallelism divides sequences, whatever the mesh of the weights: gradients are averaged over all copies and
shards, where neighbors have other tokens of one sequence in place of other sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import Tensor, nn
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from dmc.models.adapter import OF_ADAPTERS, GateAdapter
from dmc.models.build import fill_buffers
from dmc.models.gqa import merge_rows
from dmc.models.recurrent import attention_layers
from dmc.models.tensor_parallel import check_divides, count_heads, cut_modules, pieces_of
from dmc.models.weights import local_folder, open_weights, refuse_nonfinite_parts, weights_folder
from dmc.ranks import Ranks
from dmc.training.checkpoints import OPTIMIZER, WEIGHTS, weights_of
from dmc.training.config import RunConfig
from dmc.training.strategies.devices import devices_per_node
from dmc.training.strategies.parallelism import Parallelism, no_states

MESH_NAMES = ("replicate", "shard", "tensor")
TIME, HEADS = 1, 2
"""Dimensions of hidden states, [B, T, hidden], and of projected queries and keys, [B, T, H, D]."""
FULL = StateDictOptions(full_state_dict=True)


class MeshStrategy(Parallelism, ModelParallelStrategy):
    """Copies of the model, each divided among the ranks that share it; checkpoints in the background.

    Copies alone are DistributedDataParallel, with autocast in bf16-mixed; one device is neither wrapped nor joined to a
    process group. Else each decoder layer is gathered for its own forward and backward pass only: then gathered weights
    and gradients on their way are bfloat16 in bf16-mixed, the parts, the sums of gradients and the optimizer float32.
    Gradients are divided among the ranks of a copy after each micro-batch, and summed over the copies once a step.

    Ranks that divide a sequence, or its heads, are neighbors. With both, each layer's heads are cut among the tensor
    parallel ranks, and the part of each among those that divide the sequence, which are next to each other.

    Raises:
        ValueError: the devices cannot be divided as asked.
    """

    def __init__(self, config: RunConfig, process_group_backend: str | None = None) -> None:
        ModelParallelStrategy.__init__(self, process_group_backend=process_group_backend)
        Parallelism.__init__(self, config)
        self.mesh_shape = config.trainer.mesh(devices_per_node(config))
        self.num_copies, shard_size, tensor_size = self.mesh_shape
        self.holds_parts = shard_size * tensor_size > 1
        if self.holds_parts:
            self.precision = "32-true"  # what is bfloat16 is said by the policy of `fully_shard`, not by autocast

    def _configure_launcher(self) -> None:
        if self.num_nodes * self.num_processes > 1:
            super()._configure_launcher()

    def setup_environment(self) -> None:
        """Initialize the process group and make the mesh; a single device needs none."""
        if self.num_nodes * self.num_processes == 1:
            self.set_world_ranks()
            ParallelStrategy.setup_environment(self)
            return
        super().setup_environment()
        self.make_mesh(self.root_device.type)

    def make_mesh(self, device_type: str) -> None:
        """Make the mesh of the weights, and the groups of ranks that read the same sequences."""
        trainer = self.run_config.trainer
        context, tensor = trainer.context_parallel_size, trainer.tensor_parallel_size
        places = torch.arange(torch.Size(self.mesh_shape).numel()).view(-1, tensor, context)
        places = places.transpose(1, 2).reshape(self.mesh_shape)
        self.mesh = DeviceMesh(device_type, places, mesh_dim_names=MESH_NAMES)
        self.context_ranks = Ranks.new_subgroups(context, context)
        self.head_ranks = self.context_ranks if tensor == 1 else Ranks.new_subgroups(context * tensor, context)

    def setup(self, trainer: Trainer) -> None:
        """Wrap the model in DistributedDataParallel if each rank has a copy."""
        super().setup(trainer)
        if not self.holds_parts and self.num_copies > 1:
            on_gpu = self.root_device.type == "cuda"
            with torch.cuda.stream(torch.cuda.Stream()) if on_gpu else nullcontext():
                self.model = DistributedDataParallel(
                    self.lightning_module,
                    device_ids=[self.root_device.index] if on_gpu else None,
                    gradient_as_bucket_view=True,  # else the buffers of its sums hold all gradients once more
                )

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Minimize communication for micro-batches that are not the last of their step."""
        model: Any = getattr(self.lightning_module, "model", None)
        if not isinstance(model, FSDPModule):
            with super().block_backward_sync():
                yield
            return
        set_sync = (
            model.set_requires_gradient_sync
            if self.run_config.trainer.accumulate_locally
            else model.set_requires_all_reduce
        )
        set_sync(False)
        model.set_is_last_backward(False)
        yield
        set_sync(True)
        model.set_is_last_backward(True)

    def parallelize(self, model: Any, path: str) -> None:
        """See `Parallelism`: cut the heads, shard each decoder layer, then the rest, and read each rank's part.

        Raises:
            ValueError: heads or neurons cannot be divided evenly.
        """
        trainer = self.run_config.trainer
        if trainer.devices_per_sequence > 1:
            check_divides(model.config, trainer.tensor_parallel_size, trainer.context_parallel_size)
            model.ranks, model.context_ranks = self.head_ranks, self.context_ranks
        if not self.holds_parts:
            return
        mesh = self.mesh
        if mesh["tensor"].size() > 1:
            apply_tensor_parallel(model, mesh["tensor"])
        policy = MixedPrecisionPolicy()
        if self.run_config.trainer.precision == "bf16-mixed":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        parts = mesh["replicate", "shard"] if self.num_copies > 1 else mesh["shard"]
        *others, last = model.model.layers
        for layer in others:
            fully_shard(layer, mesh=parts, mp_policy=policy)
        fully_shard(last, mesh=parts, mp_policy=policy, reshard_after_forward=False)  # its backward comes next
        last.register_forward_hook(_reshard_without_backward)
        fully_shard(model, mesh=parts, mp_policy=policy)
        if next(model.parameters()).is_meta:
            self._read_parts(model, path)

    def _read_parts(self, model: Any, path: str) -> None:
        folder = local_folder(path, self.revision_of(path))
        model.to_empty(device=self.root_device)
        model.tie_weights()
        fill_buffers(model, self.root_device)
        stored = open_weights(folder)
        state: dict[str, Any] = {name: value for name, value in get_model_state_dict(model).items() if name in stored}
        reader = distributed_checkpoint.HuggingFaceStorageReader(str(weights_folder(folder)))
        in_files = reader.read_metadata().state_dict_metadata
        parts = {
            name: value
            for name, value in state.items()
            if name in in_files and OF_ADAPTERS not in name and [*value.shape] == stored[name].get_shape()
        }
        distributed_checkpoint.load(parts, storage_reader=reader)
        for name in sorted(set(state) - set(parts)):  # gates, KV heads to merge, experts that files hold apart
            holder, _, key = name.rpartition(".")
            value, head_dim = getattr(model.get_submodule(holder), key), attention_layers(model)[0].head_dim
            weight = merge_rows(stored[name][:].to(self.root_device, value.dtype), value.shape[0], head_dim)
            if isinstance(value, nn.Parameter):
                _set_full(value, weight)
            else:
                value.copy_(weight)
        read = {name: value.detach() for name, value in weights_of(model).items() if name in stored}
        local = ((name, value.to_local() if isinstance(value, DTensor) else value) for name, value in read.items())
        refuse_nonfinite_parts(local, path, self.writers)
        for name, part in model.named_modules():
            if isinstance(part, GateAdapter) and f"{name}.weight" not in stored:
                part.reset_parameters()

    @override
    def set_rows(self, parameter: nn.Parameter, rows: slice, values: Tensor | float) -> None:
        if not isinstance(parameter, DTensor):
            return super().set_rows(parameter, rows, values)
        full = parameter.full_tensor().detach()
        full[rows] = torch.as_tensor(values).to(full)
        _set_full(parameter, full)

    @override
    def tensors(self) -> dict[str, Any]:
        names = {value: name for name, value in weights_of(self.lightning_module.model).items()}
        saves_all = not self.run_config.learns_gates_alone(total_steps=1)  # a run of none saves nothing
        saved = {name: value.detach() for value, name in names.items() if saves_all or OF_ADAPTERS in name}
        tensors: dict[str, Any] = {f"{WEIGHTS}{name}": value for name, value in saved.items()}
        for optimizer in self.optimizers:
            for parameter, states in optimizer.state.items():
                tensors |= {f"{OPTIMIZER}{names[parameter]}.{key}": value for key, value in states.items()}
        return tensors

    @override
    def set_tensors(self, read: Callable[[dict[str, Any]], None]) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    optimizer.state[parameter] = no_states(parameter.detach())
        read(self.tensors())


def _reshard_without_backward(layer: Any, *_: Any) -> None:
    """Let no weights stay gathered that may be set before they are read again."""
    if not torch.is_grad_enabled():
        layer.reshard()


def _set_full(parameter: nn.Parameter, value: Tensor) -> None:
    """Set a sharded parameter to a value that every rank has."""
    holder = nn.Module()
    holder.weight = parameter
    set_model_state_dict(holder, {"weight": value}, options=FULL)


def apply_tensor_parallel(model: Any, mesh: DeviceMesh) -> None:
    """Divide the heads and the MLP's neurons among the ranks of `mesh`, see `cut_modules`.

    Between attention and MLP, in norms and residuals, each rank has its part of the tokens (sequence parallelism).
    Experts stay whole, and what makes queries, keys and values, or gate and up, in one: each rank takes its heads.
    """
    tokens, replicated = Shard(TIME), Replicate()
    ranks = Ranks(mesh.get_local_rank(), mesh.size(), mesh.get_group())
    styles: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(output_layouts=tokens),
        "head_norm": SequenceParallel(sequence_dim=HEADS, use_local_output=True),
    }
    norm = SequenceParallel(sequence_dim=TIME, use_local_output=True)
    of_layer: dict[str, ParallelStyle] = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": tokens}, desired_input_kwarg_layouts={"hidden_states": replicated}
        ),
        "mlp": PrepareModuleInput(input_layouts=tokens, desired_input_layouts=replicated),
    }
    is_trained = {name: weight.requires_grad for name, weight in model.named_parameters()}
    for name, style in cut_modules(model).items():
        module = model.get_submodule(name)
        if style == "norm":
            _divide_norm(module, mesh)
        elif name.endswith("qkv_proj"):
            count_heads(model.get_submodule(name.removesuffix(".qkv_proj")), mesh.size())
            _divide_outputs(module, ranks, pieces_of(name, module.out_features, model.config))
        elif style in styles and "expert" not in name:
            parallelize_module(module, mesh, styles[style])
    for layer in model.model.layers:
        attention = layer.self_attn
        if hasattr(attention, "sinks"):
            attention.sinks = nn.Parameter(distribute_tensor(attention.sinks.detach(), mesh, [Shard(0)]))
        for name, child in layer.named_children():
            if name.endswith("norm"):
                parallelize_module(child, mesh, norm)
            elif any(isinstance(weight, DTensor) for weight in child.parameters()):
                parallelize_module(child, mesh, of_layer[name])
            elif (
                next(child.parameters(), None) is not None
            ):  # experts, which FSDP2 shards: each rank computes all tokens
                child.register_forward_pre_hook(lambda _, inputs: (ranks.all_gather(inputs[0], TIME), *inputs[1:]))
                child.register_forward_hook(lambda _, __, output: _first_scattered(ranks, output))
    for name, weight in model.named_parameters():
        weight.requires_grad_(is_trained[name])  # the norms' are new ones under SequenceParallel
    model.model.layers[0].register_forward_pre_hook(lambda _, inputs: (ranks.scatter(inputs[0], TIME), *inputs[1:]))
    model.model.norm.register_forward_pre_hook(lambda _, inputs: (ranks.all_gather(inputs[0], TIME), *inputs[1:]))


def _divide_norm(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let a norm over all heads, of [B, T, channels] or [B, T, H, D], have each rank's heads."""
    for key, weight in list(module.named_parameters(recurse=False)):
        setattr(module, key, nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)])))
    module.register_forward_pre_hook(lambda _, inputs: (DTensor.from_local(inputs[0], mesh, [Shard(HEADS)]),))
    module.register_forward_hook(lambda _, __, output: output.to_local())


def _divide_outputs(module: nn.Module, ranks: Ranks, pieces: tuple[int, ...]) -> None:
    """Let a whole linear layer over all tokens return this rank's share of each piece of its outputs."""
    module.register_forward_pre_hook(lambda _, inputs: inputs[0].to_local())
    module.register_forward_hook(
        lambda _, __, output: torch.cat([ranks.scatter(part, -1) for part in output.split(pieces, -1)], -1)
    )


def _first_scattered(ranks: Ranks, output: Any) -> Any:
    """Return this rank's tokens of the output of experts, beside which some return what their router has said."""
    if isinstance(output, tuple):
        return (ranks.scatter(output[0], TIME), *output[1:])
    return ranks.scatter(output, TIME)
