"""Interface of the parallelism of a run's weights and gradients over its ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.utils import get_total_norm

from dmc.models import load_model, merge_kv_heads
from dmc.models.weights import empty_model
from dmc.ranks import Ranks
from dmc.training.checkpoints import (
    GENERATION_CONFIG,
    MODEL_CONFIG,
    TRAINER_STATE,
    CheckpointSaver,
    Header,
    as_damage,
    read_state,
    storage_writer,
    weights_of,
)
from dmc.training.config import Precision, RunConfig
from dmc.training.teacher import cast_products


class Parallelism:
    """Defaults for a model that is replicated on each rank; Lightning strategies inherit and override them.

    Args:
        config: the run.
    """

    precision: Precision
    """Lightning's precision setting."""
    clips_in_optimizer = False
    """Whether gradients are clipped, and those that are not finite discarded, inside the optimizer's step."""
    holds_parts = False
    """Whether no rank ever holds all of the model."""
    root_device: Any
    """Device of this rank, set by Lightning."""
    lightning_module: Any
    """The run's module, set by Lightning."""
    take_step: Callable[[list[dict[str, Any]]], None]
    """Takes an optimizer step on its micro-batches, set by `OptimizerStep`."""

    def __init__(self, config: RunConfig) -> None:
        self.run_config = config
        self.precision = config.trainer.precision
        self.saver = CheckpointSaver()

    @cached_property
    def hosts(self) -> Ranks:
        """Return a CPU group of the ranks, whose collectives wait for no device; all ranks call this together."""
        return Ranks.new_gloo_group()

    @cached_property
    def writers(self) -> Ranks:
        """Return another one, for checkpoints and exports alone: they are written while the step communicates.

        Its collectives wait for a day: one rank joins the parts of an export, however large, while the others wait.
        """
        return Ranks.new_gloo_group(timedelta(days=1))

    def load(self, path: str, is_teacher: bool = False) -> Any:
        """Load the run's model, or one to learn from; without weights until it is divided where ranks hold parts."""
        config = self.run_config
        # DeepSpeed's engine holds one model only: each rank has all of a teacher.
        reads_all = not self.holds_parts or (is_teacher and config.trainer.uses_deepspeed)
        read = load_model if reads_all else empty_model
        model = read(path, dtype=getattr(torch, config.dtype), revision=self.revision_of(path))
        return model if is_teacher or not config.merge_kv_heads else merge_kv_heads(model, config.merge_kv_heads)

    def parallelize(self, model: Any, path: str) -> None:
        """Divide a model, loaded from `path`, among the ranks, once these can talk to each other."""

    def parallelize_teacher(self, model: Any, path: str) -> None:
        """Divide it as the model, or bring it to the device: Lightning does not know it."""
        self.parallelize(model, path)
        if not self.holds_parts:
            self.cast_teacher(model)
            model.to(self.root_device)

    def cast_teacher(self, model: Any) -> None:
        """Let a teacher that is whole on each rank have its products' weights in the dtype they are computed in."""
        if self.precision == "bf16-mixed" and not self.holds_parts:
            cast_products(model, torch.bfloat16)

    def revision_of(self, path: str) -> str | None:
        """Hub revision of a model: the run's where it is the model that the run starts from."""
        return self.run_config.revision if path == self.run_config.model else None

    def set_rows(self, parameter: nn.Parameter, rows: slice, values: Tensor | float) -> None:
        """Set rows, counted over all ranks, of a weight or bias to `values`, [rows, ...], where training goes on."""
        parameter.data[rows] = torch.as_tensor(values).to(parameter)

    def gradient_norm(self, module: LightningModule) -> Tensor:
        """Return the gradient norm before clipping, a scalar; with `clips_in_optimizer` that of the last step."""
        return gradient_norm(module)

    def training_step(self, batch: list[dict[str, Any]], *_: Any) -> None:
        """Take an optimizer step: Lightning gives each batch, which is a step's micro-batches, to the strategy."""
        self.take_step(batch)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Leave the weights to `save_checkpoint`."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Leave its states to `save_checkpoint`."""
        return {}

    def tensors(self) -> dict[str, Any]:
        """Name every weight once, and every state of the optimizer by its weight; called by all ranks."""
        raise NotImplementedError

    def set_tensors(self, read: Callable[[dict[str, Any]], None]) -> None:
        """Set weights and states; called by all ranks.

        Args:
            read: fills tensors with those of a checkpoint; states of weights that were never updated stay as they are.
        """
        raise NotImplementedError

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Start writing a checkpoint: tensors are copied now, and written in the background."""
        header = Header(checkpoint["global_step"], checkpoint[MODEL_CONFIG], checkpoint.get(GENERATION_CONFIG, {}))
        group = self.writers.group

        def write(folder: Path) -> Future:
            def write_state() -> None:
                if self.writers.rank == 0:
                    torch.save(checkpoint, folder / TRAINER_STATE)

            self.writers.run_on_all(write_state, OSError)
            tensors = self.tensors()
            writer = storage_writer(folder, tensors, self.writers.size)
            options: dict[str, Any] = {"storage_writer": writer, "process_group": group, "no_dist": group is None}
            writing = distributed_checkpoint.async_save(tensors, **options)
            assert isinstance(writing, Future)
            return writing

        self.saver.save(Path(filepath), header, write, self.writers)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of any strategy and number of ranks, all of them that which the first rank has found.

        Nodes that share a folder may see what was renamed in it at other times.

        Raises:
            ValueError: it is damaged; on all ranks.
        """
        folder = Path(self.writers.all_gather_object(str(Path(checkpoint_path).absolute()))[0])
        group = self.writers.group
        planner = distributed_checkpoint.DefaultLoadPlanner(allow_partial_load=True)
        options: dict[str, Any] = {"planner": planner, "process_group": group, "no_dist": group is None}

        def read(tensors: dict[str, Any]) -> None:
            with as_damage(folder):
                reader = distributed_checkpoint.HuggingFaceStorageReader(str(folder))
                distributed_checkpoint.load(tensors, storage_reader=reader, **options)

        self.set_tensors(read)
        self.saver.last = folder
        return read_state(folder)

    @property
    def exports_parts(self) -> bool:
        """Whether all ranks write a model's weights together; else any of them has all."""
        return self.holds_parts

    def weights(self, model: Any) -> dict[str, Any]:
        """Name every weight of a model once, each as the part that this rank holds; called by all ranks."""
        return {name: value.detach() for name, value in weights_of(model).items()}


def no_states(weight: Tensor) -> dict[str, Tensor]:
    """Return AdamW's states of a weight before the first step: `step`, float32 [], and two of the weight's shape."""
    step = torch.zeros((), dtype=torch.float32, device=weight.device)
    return {"step": step, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}


def gradient_norm(module: nn.Module) -> Tensor:
    """Compute the norm over all gradients, unclipped and synchronized: a scalar, the same on every rank.

    With sharded gradients all ranks must call this together.
    """
    by_mesh: dict[Any, list[Tensor]] = defaultdict(list)  # tensors of different meshes cannot be stacked
    for parameter in module.parameters():
        if parameter.grad is not None:
            by_mesh[getattr(parameter.grad, "device_mesh", None)].append(parameter.grad)
    norms = [get_total_norm(gradients) for gradients in by_mesh.values()]
    full = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    if not full:
        return torch.zeros((), device=next(module.parameters()).device)
    return torch.linalg.vector_norm(torch.stack(full).float())


def keep_rows(parameter: nn.Parameter, rows: slice) -> None:
    """Set a gradient to 0, in place, but for some rows, counted over all ranks that divide the parameter."""
    gradient = parameter.grad
    if gradient is None:
        return
    first = 0
    local = gradient
    if isinstance(gradient, DTensor):
        local = gradient.to_local()
        _, (first, *_) = compute_local_shape_and_global_offset(
            gradient.shape, gradient.device_mesh, gradient.placements
        )
    start, stop, step = rows.indices(gradient.shape[0])
    row = torch.arange(first, first + local.shape[0], device=local.device)
    frozen = (row < start) | (row >= stop) | ((row - start) % step != 0)
    local.masked_fill_(frozen.view(-1, *[1] * (local.dim() - 1)), 0)
