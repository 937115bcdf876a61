"""The plan of a run: the stage of each optimizer step, and the schedules' values there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dmc.compression import CompressionConfig, target_ratio_at, zero_out_multiplier_at
from dmc.training.config import StageConfig, TrainingConfig


@dataclass(frozen=True)
class StepState:
    """Schedules' values at one optimizer step."""

    stage: str
    learning_rate: float
    target_ratio: float
    """Target compression ratio, >= 1."""
    neuron_multiplier: float | None
    """Scale of the borrowed neuron under plain attention; None: the gates are active."""
    delay: int | None
    """Delay of decisions in tokens; None: the model's own."""


@dataclass(frozen=True)
class _PlannedStage:
    name: str
    config: StageConfig
    start: int
    steps: int
    learning_rate: float
    whole_steps: int
    """Steps over which learning rate and delays are scheduled: more than `steps` if the ramp leads further."""
    ramp_target: float
    ramp_steps: float
    """Steps in which a retrofit's ratio climbs from 1 to `ramp_target`, independent of the run's target."""

    def reaches(self, ratio: float) -> int:
        """Return the number of steps of the run after which the ramp has reached a ratio."""
        return self.start + math.ceil(round(self.ramp_steps * (ratio - 1) / (self.ramp_target - 1), 6))


class Plan:
    """Stages in order, as a pure function of the optimizer step, so that a run resumes anywhere.

    Args:
        training: settings of the stages; zero_out is left out if no neuron is borrowed.
        target_ratio: target CR.
        compression: settings of the gates; None: learned gates with a borrowed neuron.
    Raises:
        ValueError: gates would be active before `zero_out` in the same run.
    """

    def __init__(
        self, training: TrainingConfig, target_ratio: float, compression: CompressionConfig | None = None
    ) -> None:
        self.target_ratio, self._delays = target_ratio, training.delays
        self._stages: list[_PlannedStage] = []
        start = 0
        borrows = compression is None or compression.borrows_neuron
        decisions = "per_head" if compression is None else compression.decisions
        for name, stage in training.stages.items():
            if name == "zero_out" and not borrows:
                continue
            top = target_ratio if stage.ramp_to is None else stage.ramp_to
            steps, whole_steps = (stage.num_steps(training.tokens_per_step, ratio) for ratio in (target_ratio, top))
            rate = training.learning_rate if stage.learning_rate is None else stage.learning_rate
            ramp_steps: float = round(stage.ramp_share(decisions) * whole_steps)
            if stage.tokens_per_ratio is not None:
                ramp_steps = stage.ramp_share(decisions) * stage.tokens_per_ratio / training.tokens_per_step
                top = 2.0
            self._stages.append(_PlannedStage(name, stage, start, steps, rate, whole_steps, top, ramp_steps))
            start += steps
        self.total_steps = start
        names = [stage.name for stage in self._stages]
        if "zero_out" in names and any(name in ("retrofit", "solidify") for name in names[: names.index("zero_out")]):
            raise ValueError(f"stages {names}: zero_out removes the neuron the gates use; put it before them")

    def lengths(self, step: int = 0) -> list[tuple[str, int]]:
        """Name and remaining optimizer steps of each stage that ends after `step` ones."""
        left = [(stage.name, min(stage.steps, stage.start + stage.steps - step)) for stage in self._stages]
        return [(name, steps) for name, steps in left if steps > 0]

    def at(self, step: int) -> StepState:
        """Return the state of optimizer step `step` (0 is the first); steps past the end are the last."""
        if not self._stages:  # nothing is optimized
            return StepState("none", 0.0, self.target_ratio, None, None)
        step = min(step, self.total_steps - 1)
        planned = next(stage for stage in reversed(self._stages) if stage.start <= step)
        inside = step - planned.start
        multiplier = None
        ratio = 1.0
        delay = None
        if planned.name == "zero_out":
            multiplier = zero_out_multiplier_at(inside, total_steps=planned.steps)
        elif planned.name == "retrofit":
            ramp = {"ramp_steps": planned.ramp_steps, "ramp_target": planned.ramp_target}
            ratio = target_ratio_at(inside, target_ratio=self.target_ratio, **ramp)
            if self._delays:
                delay = self._delays[inside * len(self._delays) // planned.whole_steps]
        elif planned.name == "solidify":
            ratio = self.target_ratio
            delay = self._delays[-1] if self._delays else None
        return StepState(planned.name, _learning_rate(planned, inside), ratio, multiplier, delay)

    def neuron_removed_at(self, step: int) -> bool:
        """Return whether `step` is the first after a zero-out stage, before which the rows become exactly zero."""
        return step > 0 and self.at(step - 1).stage == "zero_out" and self.at(step).stage != "zero_out"

    def snapshot_steps(self, ratios: Sequence[float]) -> dict[float, int]:
        """Return the step after which the ramp has reached each ratio; the final target is no snapshot."""
        return self.ratio_steps([ratio for ratio in ratios if ratio < self.target_ratio])

    def ratio_steps(self, ratios: Sequence[float]) -> dict[float, int]:
        """Return the step after which the ramp has reached each ratio; a short ramp reaches several in one."""
        ramp = next((stage for stage in self._stages if stage.name == "retrofit"), None)
        if ramp is None or self.target_ratio == 1:
            return {}
        return {ratio: ramp.reaches(ratio) for ratio in ratios}


def _learning_rate(planned: _PlannedStage, inside: int) -> float:
    """Linear warm-up, then constant or a cosine to `final_fraction` at the stage's end."""
    warmup, final = planned.config.warmup_steps, planned.config.final_fraction
    if inside < warmup:
        return planned.learning_rate * (inside + 1) / warmup
    progress = (inside - warmup) / max(1, planned.whole_steps - warmup)
    return planned.learning_rate * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))
