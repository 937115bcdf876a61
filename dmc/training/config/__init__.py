"""The configuration of a training run as validated dataclasses: one key, one place; derived values are properties."""

from dmc.training.config.run_config import BaseConfig, RunConfig, run_config
from dmc.training.config.trainer import PlanConfig, PlannerConfig, Precision, TrainerConfig
from dmc.training.config.training import (
    RatioControlConfig,
    RegressionInitConfig,
    SensitivityInitConfig,
    StageConfig,
    TrainingConfig,
)

__all__ = [
    "BaseConfig",
    "PlanConfig",
    "PlannerConfig",
    "Precision",
    "RatioControlConfig",
    "RegressionInitConfig",
    "RunConfig",
    "SensitivityInitConfig",
    "StageConfig",
    "TrainerConfig",
    "TrainingConfig",
    "run_config",
]
