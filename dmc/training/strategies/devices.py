"""How many devices a run has on each node."""

from __future__ import annotations

import torch

from dmc.training.config import RunConfig


def devices_per_node(config: RunConfig) -> int:
    """Return the devices of one node.

    Raises:
        ValueError: all are asked for, and there is none here to count.
    """
    devices, accelerator = config.trainer.devices, config.trainer.accelerator
    if devices != "auto":
        return int(devices)
    if accelerator != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count()
    if accelerator in ("auto", "cpu"):
        return 1  # as Lightning does
    raise ValueError(
        f"trainer.devices={devices} and this machine has no GPU to count: give the GPUs of a node, "
        "such as trainer.devices=8"
    )
