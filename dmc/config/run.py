"""One training run: its groups, and what they rule out together."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any

from dmc.bounds import Bounds, check_fields
from dmc.compression import CompressionConfig
from dmc.config.build import build_config
from dmc.config.data import DataConfig
from dmc.config.model import ModelConfig
from dmc.config.trainer import TrainerConfig
from dmc.config.training import TrainingConfig


@dataclass(frozen=True)
class RunConfig:
    """One training run.

    Raises:
        ValueError: a value is out of range or two contradict each other.
    """

    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    compression: CompressionConfig | None = None
    """None: train a base, without gates."""
    control: bool = False
    """Train for the steps that `compression` asks for, on the same text, without gates: the fair comparison."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logger: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Loggers of Lightning by name, each a mapping with a `_target_`; CSV files are written without one too."""
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Further callbacks of Lightning by name, each a mapping with a `_target_`."""
    output_dir: str = "outputs/run"
    use_previous_checkpoint: bool = False
    """Go on from the checkpoint before the last one where that is damaged; False: refuse."""
    seed: Annotated[int, Bounds(least=0, most=2**32 - 1, whole=True, note="what NumPy takes")] = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.trainer.uses_deepspeed and self.model.dtype != "float32":
            raise ValueError(
                f"model.dtype={self.model.dtype} with trainer.strategy={self.trainer.strategy}: DeepSpeed keeps the "
                "optimizer's weights in float32; set model.dtype=float32 and trainer.precision=bf16-mixed"
            )
        if self.training.distillation is not None and self.training.distillation.path is None and not self.model.path:
            raise ValueError("training.distillation of a fresh model needs a teacher: set training.distillation.path")
        if self.training.gates_only and self.trainer.uses_deepspeed:
            raise ValueError(
                f"training.gates_only=true with trainer.strategy={self.trainer.strategy}: rows of a weight cannot be "
                "frozen in DeepSpeed's flat gradients; use ddp, fsdp2 or hsdp"
            )
        if self.training.overfit_sequences is not None and self.data.streaming:
            raise ValueError("training.overfit_sequences reads cached text again and again: set data.streaming=false")
        self._check_reach()
        self._check_ramp()
        self._check_measured_start()
        self._check_delays()
        self._check_variants()
        self._check_ratios_on_the_way()

    def _check_ratios_on_the_way(self) -> None:
        for name in ("snapshot_ratios", "milestones.ratios"):
            ratios = self.training.milestones.ratios if "." in name else self.training.snapshot_ratios
            if not ratios or self.compression is None:
                continue
            if self.target_ratio == 1:
                raise ValueError(f"compression.target_ratio=1 has no snapshots on the way: empty training.{name}")
            high = [ratio for ratio in ratios if ratio > self.target_ratio]
            if high:
                raise ValueError(f"training.{name}={high} lie above compression.target_ratio={self.target_ratio}")
            if not self._climbs:
                raise ValueError(
                    f"training.{name}={ratios} need a target that climbs through them: empty them, or give the "
                    "retrofit stage a ramp_fraction > 0"
                )

    def _check_reach(self) -> None:
        if self.compression is None or not self.has_gates:
            return
        held, length = self.compression.delay + 1, self.training.sequence_length
        if held * self.target_ratio > length:
            raise ValueError(
                f"compression.target_ratio={self.target_ratio:g} is out of reach: of training.sequence_length={length} "
                f"tokens every head holds at least {held} (compression.delay={self.compression.delay} and one slot); "
                "use a smaller delay or longer sequences"
            )

    def _check_ramp(self) -> None:
        ramp = self.training.stages.get("retrofit")
        if ramp is not None and ramp.ramp_to is not None and ramp.ramp_to < self.target_ratio:
            raise ValueError(
                f"training.stages.retrofit.ramp_to={ramp.ramp_to:g} ends below compression.target_ratio="
                f"{self.target_ratio:g}: give the highest CR that the ramp is to reach, or null"
            )

    def _check_measured_start(self) -> None:
        compression = self.compression
        if self.training.measured_start is None or compression is None:
            return
        if not compression.has_adapter or compression.decisions != "per_head":
            raise ValueError(
                f"training.measured_start with compression.gate_input={compression.gate_input}, "
                f"compression.decisions={compression.decisions}: only adapters that decide for each head can start "
                "from what is measured; set compression.gate_input=hidden (or both) and decisions=per_head"
            )
        if self.trainer.tensor_parallel_size > 1:
            raise ValueError(
                f"training.measured_start with trainer.tensor_parallel_size={self.trainer.tensor_parallel_size}: heads "
                "are compressed one by one where each rank has whole layers; use tensor_parallel_size=1"
            )

    def _check_delays(self) -> None:
        delays, compression = self.training.delays, self.compression
        if not delays or compression is None:
            return
        if delays[-1] != compression.delay:
            raise ValueError(f"training.delays={delays} must end with compression.delay={compression.delay}")
        for delay in delays:
            dataclasses.replace(compression, delay=delay)

    def _check_variants(self) -> None:
        if self.training.head_agreement_weight > 0 and self.has_gates and self.decisions != "per_head":
            raise ValueError(
                f"training.head_agreement_weight={self.training.head_agreement_weight} with "
                f"compression.decisions={self.decisions}: heads that share decisions always agree; use weight 0"
            )
        if self.has_gates and self.decisions == "fixed":
            for name in ("gates_only", "ratio_control"):
                if getattr(self.training, name):
                    raise ValueError(f"training.{name} with compression.decisions=fixed: there are no gates to train")

    @property
    def has_gates(self) -> bool:
        """Whether the model learns to compress."""
        return self.compression is not None and not self.control

    @property
    def distils(self) -> bool:
        """Whether the run learns from a teacher."""
        return self.has_gates and self.training.distillation is not None

    @property
    def decisions(self) -> str:
        """Who decides in the run's gates; those of a control are not at work."""
        return "per_head" if self.compression is None else self.compression.decisions

    @property
    def _climbs(self) -> bool:
        """Whether the retrofit stage does not start at the target."""
        stage = self.training.stages.get("retrofit")
        return stage is None or stage.ramp_share(self.decisions) > 0

    @property
    def target_ratio(self) -> float:
        """Compression ratio the stages lead to; 1 for a base."""
        return 1.0 if self.compression is None else self.compression.target_ratio


def run_config(settings: Any) -> RunConfig:
    """Validate settings that Hydra has composed.

    Raises:
        ValueError: a setting is unknown, missing or out of range.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    missing = sorted(OmegaConf.missing_keys(settings))
    if missing:
        raise ValueError(f"give a value for {', '.join(missing)}")
    try:
        values: Any = OmegaConf.to_container(settings, resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(str(error).splitlines()[0]) from error
    values["compression"] = values.get("compression") or None
    del values["plan"], values["planner"]
    return build_config(RunConfig, values)
