"""Shift the decision offset so that thresholded decisions meet the target ratio on held-out text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tqdm.auto import trange

from dmc.budget import check_ratio
from dmc.ranks import ALONE, Ranks
from dmc.training.logit_histogram import LogitHistogram
from dmc.training.measure import TextScore, score_text

MAX_PASSES = 5
TOLERANCE = 0.002
"""Relative distance from the target at which the search stops."""
_SLOPES = (0.5, 2.0)
"""Bounds of what a change of the decisions, and with it of later layers, makes of a change of the offset alone."""


@dataclass(frozen=True)
class Calibration:
    """Result of a calibration: offset and scores on its text, before and after."""

    offset_before: float
    offset: float
    before: TextScore
    after: TextScore
    counts: Literal["held", "decided"]
    """What the target is a ratio of, see `CompressionConfig.target_counts`."""
    num_passes: int
    """How often the text was read."""

    @property
    def ratio(self) -> float:
        """Ratio that the calibration reached, of what the target counts."""
        return self.after.counted_ratio(self.counts)


@dataclass(frozen=True)
class _Pass:
    """The text read under one offset."""

    offset: float
    score: TextScore
    ratio: float
    """Of what the target counts."""
    histogram: LogitHistogram

    @property
    def share(self) -> float:
        return 1 / self.ratio


def calibrate_offset(
    model: Any,
    batches: Sequence[Mapping[str, Any]],
    target_ratio: float,
    sharing: Ranks = ALONE,
) -> Calibration:
    """Set the model's `decision_offset` so that its ratio on `batches`, held or decided, meets `target_ratio`.

    Training counts relaxed decisions, inference thresholded ones, whose ratio differs by some percent. A decision is
    logit > offset, so a quantile of one pass's logits is the offset, but for what changed decisions make of the logits
    of later layers: further passes measure that, `MAX_PASSES` in all. No weight changes.

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
    counts = model.compression.target_counts
    offset, passes = model.compression.decision_offset, []
    for _ in trange(MAX_PASSES, desc="calibrate", leave=False, disable=sharing.rank > 0):
        model.compression = dataclasses.replace(model.compression, decision_offset=offset)
        histogram = LogitHistogram(offset)
        score = score_text(model, batches, sharing=sharing, histogram=histogram)
        passes.append(_Pass(offset, score, score.counted_ratio(counts), histogram))
        best = min(passes, key=lambda found: abs(found.ratio / target_ratio - 1))
        if abs(best.ratio / target_ratio - 1) <= TOLERANCE:
            break
        offset = _next_offset(passes, best, 1 / target_ratio)
        if best.histogram.share_at(offset) == best.histogram.share_at(best.offset):  # no logit lies between them
            break
    model.compression = dataclasses.replace(model.compression, decision_offset=best.offset)
    first = passes[0]
    return Calibration(first.offset, best.offset, first.score, best.score, counts, len(passes))


def _next_offset(passes: Sequence[_Pass], best: _Pass, target: float) -> float:
    """Interpolate between the best pass and the nearest one across the target, in quantiles of the best's logits.

    In quantiles the curve is all but straight, with a slope of 1 where later layers see no difference.
    """
    others = [found for found in passes if found is not best]
    across = [found for found in others if (found.share - target) * (best.share - target) < 0]
    share_at, slope = best.histogram.share_at, 1.0
    if others:
        other = min(across or others, key=lambda found: abs(found.offset - best.offset))
        distance = share_at(other.offset) - share_at(best.offset)
        slope = (other.share - best.share) / distance if distance else slope
        if not across:
            slope = min(max(slope, _SLOPES[0]), _SLOPES[1])
    offset = best.histogram.offset_for(share_at(best.offset) + (target - best.share) / slope)
    is_same = share_at(offset) == share_at(best.offset)  # as on whichever side of the best one rounding has put it
    if across and not is_same and not min(best.offset, other.offset) < offset < max(best.offset, other.offset):
        return (best.offset + other.offset) / 2
    return offset
