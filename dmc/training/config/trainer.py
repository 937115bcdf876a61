"""Devices of a run, and a plan's assumptions about them."""

from __future__ import annotations

import inspect
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictInt

from dmc.config.settings import Count, checked_dataclass, suggest

Precision = Literal["32-true", "bf16-mixed"]
Strategy = Literal["auto", "ddp", "fsdp2", "hsdp", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"]

DEEPSPEED: tuple[Strategy, ...] = ("deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")
NEEDS: dict[str, tuple[Strategy, ...]] = {
    "tensor_parallel_size": ("fsdp2", "hsdp"),
    "context_parallel_size": ("ddp", "fsdp2", "hsdp"),
    "shard_size": ("hsdp",),
    "accumulate_locally": ("fsdp2", "hsdp"),
    "offload_optimizer": DEEPSPEED,
    "offload_parameters": DEEPSPEED[2:],
}
"""Options that some strategies have, and which."""
ELSEWHERE = {
    "training.stages": ("max_steps", "min_steps", "max_epochs", "min_epochs", "max_time", "limit_train_batches"),
    "training.batch_size and training.micro_batch_size": ("accumulate_grad_batches",),
    "training.gradient_clip": ("gradient_clip_val", "gradient_clip_algorithm"),
    "training.validation_sequences": ("limit_val_batches", "limit_test_batches", "limit_predict_batches"),
    "training.validate_every_steps": ("val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps"),
    "training.checkpoint_every_steps": ("enable_checkpointing",),
    "training.log_every_steps": ("log_every_n_steps",),
    "data, which has the same order on any number of devices": (
        *("use_distributed_sampler", "reload_dataloaders_every_n_epochs"),
    ),
    "logger=csv, wandb or tensorboard": ("logger",),
    "callbacks.NAME._target_": ("callbacks",),
    "debug=tiny": ("fast_dev_run", "barebones"),
    "debug=overfit": ("overfit_batches",),
    "plan=true": ("enable_model_summary",),
    "trainer.strategy": ("plugins",),
    "output_dir": ("default_root_dir",),
}
"""Arguments of Lightning's Trainer that a run sets itself, by what takes their place."""


@checked_dataclass(frozen=True)
class TrainerConfig:
    """Devices, precision, and parallelism of the model over the devices.

    Raises:
        ValueError: the strategy does not support an option.
    """

    accelerator: str = "auto"
    devices: StrictInt | str = 1
    """Devices of each node; "auto": all."""
    num_nodes: Count = 1
    strategy: Strategy = "auto"
    """auto: one device, or ddp on several."""
    tensor_parallel_size: Count = 1
    """Number of devices that share each layer's heads and neurons; fsdp2 and hsdp only."""
    context_parallel_size: Count = 1
    """Number of devices that share each sequence: every one its tokens, and in attention its heads; ddp, fsdp2 and hsdp
    only."""
    shard_size: Count | None = None
    """Number of devices that shard weights, gradients and optimizer state; hsdp only. None: those of a node."""
    accumulate_locally: StrictBool = False
    """Each device sums whole gradients over a step's micro-batches, and they are communicated once; False: they are
    divided after each micro-batch. fsdp2 and hsdp only."""
    offload_optimizer: StrictBool = False
    """Optimizer state in CPU memory; deepspeed only."""
    offload_parameters: StrictBool = False
    """Weights in CPU memory between their uses; deepspeed_zero3 only."""
    precision: Precision = "32-true"
    """bf16-mixed: bfloat16 compute on float32 weights."""
    peak_teraflops: Annotated[StrictFloat, Field(gt=0, le=1e6)] | None = None
    """Peak of one device, for MFU; None: looked up for the GPUs of `dmc.training.flops`."""
    compile: StrictBool = False
    """Whether to compile each layer with torch.compile; layers that several devices share run as they are written."""
    lightning: dict[str, Any] = field(default_factory=dict)
    """Further arguments of Lightning's Trainer."""

    def __post_init__(self) -> None:
        is_count = isinstance(self.devices, (int, str)) and str(self.devices).isdecimal() and int(self.devices) > 0
        if not (is_count or self.devices == "auto"):
            raise ValueError(
                f"trainer.devices={self.devices!r}: expected a whole number >= 1, or auto; CUDA_VISIBLE_DEVICES "
                "chooses among them"
            )
        self._check_lightning()
        if self.compile and self.uses_deepspeed:
            raise ValueError(
                f"trainer.compile=true with {self.strategy}, whose hooks cannot be compiled: use fsdp2, or "
                "trainer.compile=false"
            )
        for option, strategies in NEEDS.items():
            if (value := getattr(self, option)) != getattr(TrainerConfig, option) and self.strategy not in strategies:
                raise ValueError(
                    f"trainer.{option}={str(value).lower()} needs trainer.strategy={' or '.join(strategies)}, not "
                    f"{self.strategy}"
                )

    def _check_lightning(self) -> None:
        if not self.lightning:
            return
        from lightning import Trainer

        known = inspect.signature(Trainer).parameters
        for name in self.lightning:
            if name not in known:
                raise ValueError(f"unknown setting trainer.lightning.{name}: {suggest(name, known)}")
            instead = next((setting for setting, names in ELSEWHERE.items() if name in names), None)
            if instead is not None or name in self.__dataclass_fields__:
                raise ValueError(
                    f"trainer.lightning.{name} is set by the run itself: use {instead or f'trainer.{name}'}"
                )

    @property
    def uses_deepspeed(self) -> bool:
        """Whether DeepSpeed owns the optimizer."""
        return self.strategy in DEEPSPEED

    @property
    def compiles_layers(self) -> bool:
        """Whether layers run compiled: collectives within them are not."""
        return self.compile and self.devices_per_sequence == 1

    @property
    def devices_per_sequence(self) -> int:
        """Number of devices that read the same sequences: they share each layer's heads."""
        return self.tensor_parallel_size * self.context_parallel_size

    def mesh(self, devices_per_node: int) -> tuple[int, int, int]:
        """Return how the devices are arranged: (copies of the weights, devices that divide one, tensor parallel size).

        Raises:
            ValueError: they cannot be divided so.
        """
        num_devices, tensor = devices_per_node * self.num_nodes, self.tensor_parallel_size
        if num_devices % self.devices_per_sequence:
            context = f" * context_parallel_size={self.context_parallel_size}" if self.context_parallel_size > 1 else ""
            raise ValueError(
                f"trainer.tensor_parallel_size={tensor}{context} does not divide the {num_devices} devices"
            )
        num_ranks = num_devices // tensor
        of_node = max(1, devices_per_node // tensor)
        shard = {"fsdp2": num_ranks, "hsdp": self.shard_size or of_node}.get(self.strategy, 1)
        if num_ranks % shard:
            raise ValueError(f"trainer.shard_size={shard} does not divide the {num_ranks} data parallel ranks")
        return num_ranks // shard, shard, tensor


@checked_dataclass(frozen=True)
class PlannerConfig:
    """A plan's assumptions about the devices."""

    device: str | None = None
    """Name of the GPU; None: this machine's, or the assumed one."""
    device_memory_gib: Annotated[StrictFloat, Field(gt=0, le=1e6)] | None = None
    """Memory of one device; None: this machine's GPU's, or the assumed one's; with accelerator=cpu this machine's."""
    assumed_device: Annotated[str, Field(min_length=1)] = "NVIDIA H100 80GB HBM3"
    """Name of the GPU that a run's settings are meant for: where this machine has none, a plan is for it."""
    assumed_memory_gib: Annotated[StrictFloat, Field(gt=0, le=1e6)] = 80.0
    """Its memory."""
    utilization: Annotated[StrictFloat, Field(gt=0, le=1)] = 0.35
    """Assumed model FLOPs per second over the data sheet's peak (MFU): measure yours; it changes only assumed times."""


@checked_dataclass(frozen=True)
class PlanConfig:
    """Whether a command plans its run instead of starting it."""

    plan: StrictBool | Literal["json"] = False
    """True: print the plan; json: as JSON."""
    planner: PlannerConfig = field(default_factory=PlannerConfig)
