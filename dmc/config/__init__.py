"""The configuration of a training run as validated dataclasses: one key, one place; derived values are properties."""

from dmc.config.build import build_config
from dmc.config.data import DataConfig, FactsConfig, TokenizerConfig
from dmc.config.run import ModelConfig, RunConfig, run_config
from dmc.config.trainer import PlannerConfig, Precision, Strategy, TrainerConfig
from dmc.config.training import (
    DistillationConfig,
    MeasuredStartConfig,
    MilestonesConfig,
    RatioControlConfig,
    RegressedStartConfig,
    StageConfig,
    StageName,
    TrainingConfig,
)

__all__ = [
    "DataConfig",
    "DistillationConfig",
    "FactsConfig",
    "MeasuredStartConfig",
    "MilestonesConfig",
    "ModelConfig",
    "PlannerConfig",
    "Precision",
    "RatioControlConfig",
    "RegressedStartConfig",
    "RunConfig",
    "StageConfig",
    "StageName",
    "Strategy",
    "TokenizerConfig",
    "TrainerConfig",
    "TrainingConfig",
    "build_config",
    "run_config",
]
