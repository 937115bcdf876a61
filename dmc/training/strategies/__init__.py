"""How the weights of a run lie over its ranks: `whole.py` (one device, ddp), `fsdp2.py`, `zero.py` (DeepSpeed)."""

from __future__ import annotations

from dmc.config import RunConfig
from dmc.training.strategies.whole import WholeModel

__all__ = ["WholeModel", "build_strategy"]


def build_strategy(config: RunConfig) -> WholeModel:
    """Make what `config.trainer.strategy` names.

    Raises:
        ValueError: the strategy's library is not installed.
    """
    if config.trainer.strategy == "fsdp2":
        from dmc.training.strategies.fsdp2 import Fsdp2

        return Fsdp2(config)
    if config.trainer.uses_deepspeed:
        try:
            from dmc.training.strategies.zero import Zero
        except ImportError as error:
            raise ValueError(
                f"trainer.strategy={config.trainer.strategy} needs DeepSpeed ({error}): "
                "pip install dmc-retrofit[deepspeed]"
            ) from error
        return Zero(config)
    return WholeModel(config)
