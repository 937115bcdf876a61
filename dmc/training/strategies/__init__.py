"""Parallelism of a run's weights over its ranks: `mesh.py` (one device, ddp, fsdp2, hsdp), `zero.py` (DeepSpeed)."""

from __future__ import annotations

from typing import Any

from dmc.training.config import RunConfig
from dmc.training.strategies.parallelism import Parallelism

__all__ = ["Parallelism", "build_strategy"]


def build_strategy(config: RunConfig) -> Any:
    """Make the strategy that `config.trainer.strategy` names: Lightning's, and a `Parallelism`.

    Raises:
        ValueError: the strategy's library is not installed, or the devices cannot be divided as asked.
    """
    if not config.trainer.uses_deepspeed:
        from dmc.training.strategies.mesh import MeshStrategy

        return MeshStrategy(config)
    try:
        from dmc.training.strategies.zero import ZeroStrategy
    except ImportError as error:
        raise ValueError(
            f"trainer.strategy={config.trainer.strategy} needs DeepSpeed ({error}): pip install dmc-retrofit[deepspeed]"
        ) from error
    return ZeroStrategy(config)
