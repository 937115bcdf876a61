"""Ramps of a retrofit: the target compression ratio and the multiplier that removes the borrowed neuron."""

from __future__ import annotations

from dmc.budget import check_ratio


def target_ratio_at(step: int, *, target_ratio: float, ramp_steps: float, ramp_target: float | None = None) -> float:
    """Return the target ratio at an optimizer step: min(CR, 1 + (ramp_target - 1) * step / ramp_steps).

    Linear in the ratio, as in the paper, not in its inverse; `ramp_steps=0` is DMC-immediate.

    Args:
        step: 0 is the first.
        target_ratio: CR at which the climb ends.
        ramp_steps: steps in which the ratio climbs from 1 to `ramp_target`.
        ramp_target: ratio at the end of the ramp, where several targets share one; None: the target.
    Raises:
        ValueError: a ratio is below 1, or a step count is negative.
    """
    check_ratio(target_ratio, "target_ratio")
    if step < 0 or ramp_steps < 0:
        raise ValueError(f"step={step}, ramp_steps={ramp_steps}: expected numbers >= 0")
    if ramp_steps == 0:
        return target_ratio
    top = target_ratio if ramp_target is None else check_ratio(ramp_target, "ramp_target")
    return min(target_ratio, 1.0 + (top - 1.0) * step / ramp_steps)


def zero_out_multiplier_at(step: int, *, total_steps: int, ramp_fraction: float = 0.8) -> float:
    """Return the multiplier of the borrowed neuron (eq. 13): 1 at step 0, 0 from `ramp_fraction` of the stage on.

    The official code reaches 0 after 80 % of the stage and leaves the rest for the model to settle.

    Raises:
        ValueError: `ramp_fraction` is not in (0, 1], `total_steps` < 1, or the step is negative.
    """
    if not 0 < ramp_fraction <= 1 or total_steps < 1 or step < 0:
        raise ValueError(
            f"step={step}, total_steps={total_steps}, ramp_fraction={ramp_fraction}: expected >= 0, >= 1 and in (0, 1]"
        )
    return max(0.0, 1.0 - step / (ramp_fraction * total_steps))
