"""Devices of a run, what a plan assumes of them, and its loggers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["32-true", "bf16-mixed"]
Strategy = Literal["auto", "ddp", "fsdp2", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"]


@dataclass(frozen=True)
class TrainerConfig:
    """Devices, precision, and how the model is spread over the devices.

    Raises:
        ValueError: a value is out of range, or the strategy does not have what is asked of it.
    """

    accelerator: str = "auto"
    devices: int | str = 1
    """Devices of each node; "auto": all."""
    num_nodes: int = 1
    strategy: Strategy = "auto"
    """auto: one device, or ddp on several."""
    tensor_parallel_size: int = 1
    """Devices that share each layer's heads and neurons; fsdp2 only."""
    offload_optimizer: bool = False
    """Optimizer state in CPU memory; deepspeed only."""
    offload_parameters: bool = False
    """Weights in CPU memory between their uses; deepspeed_zero3 only."""
    precision: Precision = "32-true"
    """bf16-mixed: bfloat16 compute on float32 weights."""
    peak_teraflops: float | None = None
    """What one device could do at best, for MFU; None: looked up for the GPUs of `dmc.training.flops`."""

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise ValueError(f"trainer.num_nodes={self.num_nodes}: expected a whole number >= 1")
        if self.peak_teraflops is not None and self.peak_teraflops <= 0:
            raise ValueError(f"trainer.peak_teraflops={self.peak_teraflops}: expected a number > 0, or null")
        if self.tensor_parallel_size < 1:
            raise ValueError(f"trainer.tensor_parallel_size={self.tensor_parallel_size}: expected a whole number >= 1")
        if self.tensor_parallel_size > 1 and self.strategy != "fsdp2":
            raise ValueError(
                f"trainer.tensor_parallel_size={self.tensor_parallel_size} needs trainer.strategy=fsdp2, "
                f"not {self.strategy}"
            )
        if self.offload_optimizer and not self.uses_deepspeed:
            raise ValueError(
                f"trainer.offload_optimizer=true needs one of the deepspeed strategies, not {self.strategy}"
            )
        if self.offload_parameters and self.strategy != "deepspeed_zero3":
            raise ValueError(
                f"trainer.offload_parameters=true needs trainer.strategy=deepspeed_zero3, not {self.strategy}: the "
                "others keep every weight on its device"
            )

    @property
    def uses_deepspeed(self) -> bool:
        """Whether DeepSpeed owns the optimizer."""
        return self.strategy.startswith("deepspeed_")


@dataclass(frozen=True)
class PlannerConfig:
    """What a plan assumes of the devices.

    Raises:
        ValueError: a value is out of range.
    """

    device: str | None = None
    """Name of the GPU; None: this machine's, or an H100."""
    device_memory_gib: float | None = None
    """Memory of one device; None: of this machine's GPU, or 80; of this machine with accelerator=cpu."""
    utilisation: float = 0.35
    """Model FLOPs per second over the device's peak (MFU); well-tuned runs of this size report 0.35 to 0.45."""

    def __post_init__(self) -> None:
        if not 0 < self.utilisation <= 1:
            raise ValueError(f"planner.utilisation={self.utilisation}: expected a share of the peak, > 0 and <= 1")
        if self.device_memory_gib is not None and self.device_memory_gib <= 0:
            raise ValueError(f"planner.device_memory_gib={self.device_memory_gib}: expected GiB > 0")


@dataclass(frozen=True)
class LoggerConfig:
    """CSV files always; wandb on request, never with a prompt."""

    wandb_project: str | None = None
    """None: no wandb."""
    wandb_mode: Literal["auto", "online", "offline"] = "auto"
    """auto: what WANDB_MODE says, else online if you are logged in, else offline; online: refused without a login."""
