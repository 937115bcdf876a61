"""The configuration of a training run as validated dataclasses: one key, one place; derived values are properties."""

from dmc.config.data import DataConfig, FactsConfig
from dmc.config.run import ModelConfig, RunConfig, run_config
from dmc.config.trainer import PlannerConfig, Precision, TrainerConfig
from dmc.config.training import (
    RatioControlConfig,
    RegressionInitConfig,
    SensitivityInitConfig,
    StageConfig,
    TrainingConfig,
)
from dmc.settings import build_config

__all__ = [
    "DataConfig",
    "FactsConfig",
    "ModelConfig",
    "PlannerConfig",
    "Precision",
    "RatioControlConfig",
    "RegressionInitConfig",
    "RunConfig",
    "SensitivityInitConfig",
    "StageConfig",
    "TrainerConfig",
    "TrainingConfig",
    "build_config",
    "run_config",
]
