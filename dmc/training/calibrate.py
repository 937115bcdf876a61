"""Shift the decision offset so that thresholded decisions meet the target ratio on held-out text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tqdm.auto import trange

from dmc.budget import check_ratio
from dmc.ranks import ALONE, Ranks
from dmc.training.measure import TextScore, score_text

NUM_DOUBLINGS = 12
NUM_HALVINGS = 12
FIRST_STEP = 4.0
"""First shift of the offset; doubled until the target lies between two offsets, in all by up to 16,380."""
TOLERANCE = 0.002
"""Relative distance from the target at which the search stops."""


@dataclass(frozen=True)
class Calibration:
    """Result of a calibration: offset and scores on its text, before and after."""

    offset_before: float
    offset: float
    before: TextScore
    after: TextScore
    counts: Literal["held", "decided"]
    """What the target is a ratio of, see `CompressionConfig.target_counts`."""

    @property
    def ratio(self) -> float:
        """Ratio that the calibration reached, of what the target counts."""
        return _counted(self.after, self.counts)


def calibrate_offset(
    model: Any,
    batches: Sequence[Mapping[str, Any]],
    target_ratio: float,
    sharing: Ranks = ALONE,
) -> Calibration:
    """Set the model's `decision_offset` so that its ratio on `batches`, held or decided, meets `target_ratio`.

    Training counts relaxed decisions, inference thresholded ones, whose ratio differs by some percent. A larger offset
    merges less; the search doubles its steps until it has passed the target, for how far the logits spread depends on
    the model and its `decision_scale`, then halves the interval. No weight changes.

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
    before, counts = model.compression.decision_offset, model.compression.target_counts

    def score_at(offset: float) -> TextScore:
        model.compression = dataclasses.replace(model.compression, decision_offset=offset)
        return score_text(model, batches, sharing=sharing)

    def distance(score: TextScore) -> float:
        return abs(_counted(score, counts) / target_ratio - 1)

    first = best = score = score_at(before)
    best_offset = offset = before
    low, high, step = -math.inf, math.inf, FIRST_STEP
    for number in trange(NUM_DOUBLINGS + NUM_HALVINGS, desc="calibrate", leave=False, disable=sharing.rank > 0):
        if distance(best) <= TOLERANCE:
            break
        low, high = (offset, high) if _counted(score, counts) > target_ratio else (low, offset)
        if math.isfinite(high - low):
            offset = (low + high) / 2
        elif number < NUM_DOUBLINGS:
            offset, step = (offset + step if high == math.inf else offset - step), 2 * step
        else:
            break
        score = score_at(offset)
        if distance(score) < distance(best):
            best_offset, best = offset, score
    model.compression = dataclasses.replace(model.compression, decision_offset=best_offset)
    return Calibration(before, best_offset, first, best, counts)


def _counted(score: TextScore, counts: str) -> float:
    return score.achieved_ratio if counts == "held" else score.decided_ratio
