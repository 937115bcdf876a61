"""Devices of a run, what a plan assumes of them, and its loggers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from dmc.bounds import Bounds, Count, check_fields

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
    num_nodes: Count = 1
    strategy: Strategy = "auto"
    """auto: one device, or ddp on several."""
    tensor_parallel_size: Count = 1
    """Devices that share each layer's heads and neurons; fsdp2 only."""
    offload_optimizer: bool = False
    """Optimizer state in CPU memory; deepspeed only."""
    offload_parameters: bool = False
    """Weights in CPU memory between their uses; deepspeed_zero3 only."""
    precision: Precision = "32-true"
    """bf16-mixed: bfloat16 compute on float32 weights."""
    peak_teraflops: Annotated[float, Bounds(above=0, most=1e6, note="of one device; null: by its name")] | None = None
    """What one device could do at best, for MFU; None: looked up for the GPUs of `dmc.training.flops`."""

    def __post_init__(self) -> None:
        check_fields(self, "trainer.")
        is_count = isinstance(self.devices, (int, str)) and str(self.devices).isdecimal() and int(self.devices) > 0
        if not (is_count or self.devices == "auto"):
            raise ValueError(
                f"trainer.devices={self.devices!r}: expected a whole number >= 1, or auto; CUDA_VISIBLE_DEVICES "
                "chooses among them"
            )
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
    device_memory_gib: Annotated[float, Bounds(above=0, most=1e6, note="GiB")] | None = None
    """Memory of one device; None: of this machine's GPU, or 80; of this machine with accelerator=cpu."""
    utilisation: Annotated[float, Bounds(above=0, most=1, note="share of the peak")] = 0.35
    """Model FLOPs per second over the device's peak (MFU); well-tuned runs of this size report 0.35 to 0.45."""

    def __post_init__(self) -> None:
        check_fields(self, "planner.")


@dataclass(frozen=True)
class LoggerConfig:
    """CSV files always; wandb on request, never with a prompt."""

    wandb_project: str | None = None
    """None: no wandb."""
    wandb_mode: Literal["auto", "online", "offline"] = "auto"
    """auto: what WANDB_MODE says, else online if you are logged in, else offline; online: refused without a login."""
