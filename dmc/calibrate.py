"""Shift the decision offset so that thresholded decisions meet the target ratio on held-out text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm.auto import trange

from dmc.budget import check_ratio
from dmc.measure import score_text
from dmc.ranks import ALONE, Ranks

NUM_HALVINGS = 12
REACH = 4.0
"""Largest shift of the offset."""
TOLERANCE = 0.002
"""Relative distance from the target at which the search stops."""


@dataclass(frozen=True)
class Calibration:
    """Result of a calibration."""

    offset_before: float
    offset: float
    ratio_before: float
    achieved_ratio: float


def calibrate_offset(
    model: Any,
    batches: Sequence[Mapping[str, Any]],
    target_ratio: float,
    sharing: Ranks = ALONE,
) -> Calibration:
    """Set the model's `decision_offset` so that its achieved ratio on `batches` meets `target_ratio`.

    Training counts relaxed decisions, inference thresholded ones, whose ratio differs by some percent. A larger offset
    merges less; the search halves an interval of `REACH` on either side. No weight changes.

    Args:
        model: a compressed causal LM; its `compression` is replaced.
        batches: held-out text, see `score_text`.
        target_ratio: CR >= 1.
        sharing: ranks that divide the batches; all of them call this, with the same result.
    Raises:
        ValueError: the target is no ratio, or the model has no gates with an offset.
    """
    check_ratio(target_ratio, "target_ratio")
    if getattr(model, "compression", None) is None:
        raise ValueError("the model has no gates to calibrate: retrofit it first")
    if model.compression.decisions == "fixed":
        raise ValueError("fixed decisions have no offset to calibrate: their ratio is compression.target_ratio")
    before = model.compression.decision_offset

    def ratio_at(offset: float) -> float:
        model.compression = dataclasses.replace(model.compression, decision_offset=offset)
        return score_text(model, batches, sharing=sharing).achieved_ratio

    best_offset, best_ratio = before, ratio_at(before)
    ratio_before, low, high = best_ratio, before - REACH, before + REACH
    offset, ratio = before, ratio_before
    for _ in trange(NUM_HALVINGS, desc="calibrate", leave=False, disable=sharing.rank > 0):
        if abs(best_ratio / target_ratio - 1) <= TOLERANCE:
            break
        low, high = (offset, high) if ratio > target_ratio else (low, offset)
        offset = (low + high) / 2
        ratio = ratio_at(offset)
        if abs(ratio / target_ratio - 1) < abs(best_ratio / target_ratio - 1):
            best_offset, best_ratio = offset, ratio
    model.compression = dataclasses.replace(model.compression, decision_offset=best_offset)
    return Calibration(before, best_offset, ratio_before, best_ratio)
