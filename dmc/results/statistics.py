"""Statistical comparison of methods: the only code that compares measurements.

* Methods are paired sample by sample: only measurements with one `samples_key` are compared.
* Samples of one context (a file, a text) and models of one seed are no independent evidence: errors are clustered by
  both. Bounds are Student's: of the contexts' part with their degrees of freedom, of the seeds' part with theirs.
* "worse" and "as good" are claims at 95 % each: the difference's lower bound is above 0, or its upper bound within the
  margin. All else is "unknown", and so is everything whose spread is: one sample, one context. Of n contexts whose
  answers agree 3 in n may still differ, so that "as good" then needs 3 / margin contexts; see `UNSEEN`.
* The margin that samples carry is the distance of a bound from the mean.
* Equal memory is bytes over all scored positions, within `SAME_BYTES`, as measured: nothing is interpolated (whole
  pages may leave a baseline a little more, and the table says so). The budget `bytes:NAME` measures methods in as many;
  without such a measurement a method has no figure.

`summarize` makes one line of each method, budget, task and metric, over its seeds; `beside_baselines` puts compressed
models beside training-free methods in their bytes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy
import pandas
from scipy.special import stdtrit

from dmc.results.equal_bytes import SAME_BYTES, WHOLE_PAGES, asked_of

CONFIDENCE = 0.95
"""Confidence of each bound, one-sided."""
MARGIN = 0.02
"""Largest loss that counts as "as good": nats per token, or share of answers; relative for metrics above 1."""
UNSEEN = 3.0
"""Answers: 3 in n contexts may be unlike all n, and differ by so many times the largest difference of any of these, or
wholly where none differs."""
PAIRED = ["task", "metric", "task_key", "samples_key"]
"""Columns in which measurements agree that are paired sample by sample."""
OF_FULL = ["key", "model", "named", "variant", "policy", "seed", "value", "samples", "bytes_per_token"]
"""Columns of the full cache that a measurement is compared with."""
BESIDE = ["variant", "task", "metric", "baseline", "baseline_value", "baseline_error", "baseline_lost"]
BESIDE += ["baseline_bytes", "gap", "gap_error", "gap_lower", "gap_upper", "seeds", "seeds_ahead"]
Standing = Literal["as good", "worse", "unknown", ""]
Seeds = Sequence[Sequence[float]] | numpy.ndarray
"""Values of samples by seed; all seeds have the same samples."""


@dataclass(frozen=True)
class Estimate:
    """A mean over samples and seeds, with the bounds of its loss."""

    value: float
    """The mean; NaN: there is nothing to compare with."""
    variance: float = math.nan
    """Variance of the mean over contexts; NaN: unknown, nothing can be claimed."""
    degrees: float = math.inf
    """Degrees of freedom of that variance."""
    floor: float = 0.0
    """Part of the bounds' distance that is for contexts unlike the sampled ones."""
    num_contexts: int = 0
    by_seed: tuple[float, ...] = ()
    """Mean of each seed."""

    @property
    def variance_of_seeds(self) -> float:
        """Variance of the mean over seeds; 0 for a single one."""
        return float(numpy.var(self.by_seed, ddof=1)) / len(self.by_seed) if len(self.by_seed) > 1 else 0.0

    @property
    def error(self) -> float:
        """Standard error; NaN: unknown."""
        return math.sqrt(self.variance + self.variance_of_seeds)

    @property
    def reach(self) -> float:
        """Distance between the value and its bounds: the margin that the samples carry; infinite: none.

        Each variance is stretched by its own quantile: one of their sum is too small where two seeds happen to be
        alike.
        """
        if math.isnan(self.variance):
            return math.inf
        of_contexts = _quantile(self.degrees) ** 2 * self.variance + self.floor**2
        of_seeds = _quantile(len(self.by_seed) - 1) ** 2 * self.variance_of_seeds if self.variance_of_seeds else 0.0
        return math.sqrt(of_contexts + of_seeds)

    @property
    def lower(self) -> float:
        """Lower bound with 95 % confidence."""
        return self.value - self.reach

    @property
    def upper(self) -> float:
        """Upper bound with 95 % confidence."""
        return self.value + self.reach

    @property
    def num_seeds_above(self) -> int:
        """Number of seeds whose mean is above 0."""
        return sum(mean > 0 for mean in self.by_seed)

    def standing(self, margin: float) -> Standing:
        """Return what a loss shows: "as good" up to the margin, "worse", "unknown", or "" without a value."""
        if math.isnan(self.value):
            return ""
        if self.upper <= margin:
            return "as good" if math.isfinite(self.reach) else "unknown"
        return "worse" if self.lower > 0 else "unknown"

    def contexts_needed(self, margin: float) -> int | None:
        """Return the contexts that would carry a margin at this spread.

        None: the spread is unknown, or that of the seeds alone is too large.
        """
        if math.isinf(self.reach) or replace(self, variance=0.0, floor=0.0).reach >= margin:
            return None

        def is_enough(contexts: int) -> bool:
            more = contexts / self.num_contexts
            degrees = max(1.0, (self.degrees + 1) * more - 1)
            scaled = replace(self, variance=self.variance / more, degrees=degrees, floor=self.floor / more)
            return scaled.reach <= margin

        most = 2
        while not is_enough(most):
            most *= 2
        return bisect_left(range(most), True, lo=2, key=is_enough)


def _quantile(degrees: float) -> float:
    return float(stdtrit(degrees, CONFIDENCE))


def estimate(values: Seeds, contexts: Sequence[Any] = (), are_answers: bool = False) -> Estimate:
    """Estimate a mean, its error clustered by context and by seed.

    The two variances are added, which counts the variance within a context and seed twice: with few seeds this is
    conservative.

    Args:
        values: see `Seeds`.
        contexts: context of each sample; empty: each sample has its own.
        are_answers: whether they are (differences of) scores from 0 to 1, such as right or wrong answers, whose rare
            losses a few contexts need not show: see `UNSEEN`.
    """
    found = numpy.asarray(values, dtype=float)
    mean, by_seed, samples = float(found.mean()), tuple(found.mean(1).tolist()), found.shape[1]
    members = numpy.unique([repr(context) for context in contexts or range(samples)], return_inverse=True)[1]
    sizes = numpy.bincount(members)
    num = len(sizes)
    if num < 2:
        return Estimate(mean, num_contexts=num, by_seed=by_seed)
    parts = numpy.bincount(members, found.mean(0) - mean) / (samples - sizes)  # without each context: the jackknife
    variance = (num - 1) / num * float(parts @ parts)
    degrees = max(1.0, samples**2 / float(sizes @ sizes) - 1)  # uneven contexts count as fewer even ones
    largest = float(numpy.abs(numpy.bincount(members, found.mean(0)) / sizes).max())
    unseen = (min(1.0, UNSEEN * largest) or 1.0) if are_answers else 0.0
    return Estimate(mean, variance, degrees, 3 / num * unseen, num, by_seed)


def difference(values: Seeds, other: Seeds, contexts: Sequence[Any] = (), higher_is_better: bool = False) -> Estimate:
    """Estimate how much worse `values` are than `other`, paired by sample and seed.

    Scores from 0 to 1 for which higher is better are answers: see `estimate`.
    """
    both = numpy.asarray([values, other], dtype=float)
    if not higher_is_better:
        return estimate(both[0] - both[1], contexts)
    return estimate(both[1] - both[0], contexts, are_answers=bool(((both >= 0) & (both <= 1)).all()))


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """Average the estimates of several tasks, which share seeds but no contexts.

    What no context shows may all be in the task with the highest floor.
    """
    num, seeds = len(estimates), [part.by_seed for part in estimates]
    if num == 1:
        return estimates[0]
    value = math.fsum(part.value for part in estimates) / num
    by_seed = tuple(numpy.mean(seeds, axis=0).tolist()) if len({*map(len, seeds)}) == 1 else ()
    parts = [(part.variance, part.degrees) if by_seed else (part.error**2, math.inf) for part in estimates]
    total = sum(variance for variance, _ in parts)
    below = sum(variance**2 / degrees for variance, degrees in parts)
    floor, contexts = max(part.floor for part in estimates) / num, sum(part.num_contexts for part in estimates)
    return Estimate(value, total / num**2, total**2 / below if below else math.inf, floor, contexts, by_seed)


def margin_of(metric: str, full: float) -> float:
    """Return the largest loss against a full cache that counts as "as good", in its metric."""
    return MARGIN if metric.endswith("loss") else MARGIN * max(1.0, abs(full))


def summarize(
    frame: pandas.DataFrame, reference: str | None = None, metrics: Sequence[str] | None = None
) -> pandas.DataFrame:
    """Make one line of each method, budget, task (or benchmark, the mean of several) and metric, over its seeds.

    Args:
        frame: of `Store.frame`.
        reference: model or variant whose full cache compressed models, and other full caches, are compared with; None:
            compressed models with the reference of their measurement, or else the only full cache.
        metrics: metrics to summarize; None: each task's main one.
    Returns:
        Columns: `title` (method and budget), `variant`, `policy`, `learned`, `is_full`, `budget`, `asked` (CR 4, 128
        tokens, full cache), `task`, `metric`, `higher_is_better`, `split`, `question`, `target_counts`; `value`,
        `value_error`;
        `against` (the full cache it is compared with), `lost` (how much worse it is, positive is worse), `lost_error`,
        `lost_lower`, `lost_upper`, `margin`, `standing`, `carried` (the margin that the samples carry),
        `contexts_needed` (to carry `margin`), `seeds`, `seeds_worse`; `requested_ratio`, `requested_bytes_per_token`,
        `achieved_ratio`, `bytes_per_token`, `share` (of the full cache's bytes), `end_ratio`, `peak_bytes`, `samples`,
        `contexts`, `keys`.
    """
    measured, lines = _beside_full(frame, reference, metrics), []
    by = ["shown", "variant", "policy", "learned", "budget", *(["metric"] if metrics is not None else [])]
    for _, group in measured.groupby(by, dropna=False, sort=False):
        for _, same in group.groupby("task_key", sort=False):
            if set(same["members"].iloc[0]) <= set(same["task"]):
                lines.append(_line(same))
    summary = pandas.DataFrame(lines)
    if len(summary):
        for name in ("budget", "split", "question", "target_counts"):
            summary[name] = pandas.Series([line[name] for line in lines], dtype=object)  # None stays None
    return summary


def _beside_full(frame: pandas.DataFrame, reference: str | None, metrics: Sequence[str] | None) -> pandas.DataFrame:
    """Return the newest measurements over all samples of a task, with columns `NAME_of_full` of its full cache.

    The full cache is that of the row's model; of compressed models, and if a reference is given of other full caches,
    that of the reference, with the same seed if there is one. NaN: there is none on the same samples, or nothing says
    which.
    """
    is_shown = frame["is_main"] if metrics is None else frame["metric"].isin(metrics)
    measured = frame[(frame["by"] == "") & is_shown]
    measured = measured if reference is None else measured.assign(reference=reference)
    method = ["variant", "policy", "learned", "budget", "task", "metric", "task_key"]
    newest = measured.drop_duplicates([*method, "model"], keep="last")
    last = newest.groupby(method, dropna=False)["samples_key"].transform("last")
    newest = newest[newest["samples_key"].isna() | (newest["samples_key"] == last)]
    full = measured[measured["is_full"]][[*PAIRED, *OF_FULL]]
    both = newest.reset_index().merge(full, on=PAIRED, suffixes=("", "_of_full"))
    is_named = both["reference"].isna()
    for name in ("model", "named", "variant"):
        is_named |= both[f"{name}_of_full"] == both["reference"]
    needs_reference = both["learned"] | (both["is_full"] & (reference is not None))
    both = both[is_named.where(needs_reference, both["model_of_full"] == both["model"])]
    same_seed = both["seed_of_full"] == both["seed"]
    both = both[same_seed | ~same_seed.groupby(both["index"]).transform("any")]
    both = both[both.groupby("index")["model_of_full"].transform("nunique") == 1]
    both = both.drop_duplicates("index", keep="last").set_index("index")
    shown = newest["benchmark"].fillna(newest["task"])
    return newest.assign(shown=shown).join(both[[f"{name}_of_full" for name in OF_FULL]])


def _line(group: pandas.DataFrame) -> dict[str, Any]:
    """Summarize the measurements of one method at one budget, over its seeds and the tasks of a benchmark."""
    first, parts = group.iloc[0], [rows for _, rows in group.groupby("task", sort=False)]
    value, lost = mean_of([_value_of(rows) for rows in parts]), mean_of([_lost(rows) for rows in parts])
    full = group[["value_of_full", "bytes_per_token_of_full"]].mean(skipna=False)
    weights = group["mean_tokens"] * group["num_samples"].clip(lower=1)
    sizes = group[["bytes_per_token", "requested_bytes_per_token"]].mul(weights, axis=0).sum(skipna=False)
    entries = (1 / group[["requested_ratio", "achieved_ratio", "end_ratio"]]).mul(weights, axis=0).sum()
    names = ["variant", "policy", "learned", "is_full", "budget", "metric", "higher_is_better", "split", "question"]
    names += ["target_counts"]
    asked, margin = asked_of(first), margin_of(first["metric"], full["value_of_full"])
    method = f"{first['variant']}, {'learned' if first['learned'] and first['budget'] is None else first['policy']}"
    is_compared = not math.isnan(lost.value)
    return {
        "title": method if first["is_full"] else f"{method}, {asked}",
        "method": method,
        **first[[*names]],
        "metric": first["metric"] if group["metric"].nunique() == 1 else "mean",
        "asked": asked,
        "task": first["benchmark"] or first["task"],
        "value": value.value,
        "value_error": value.error,
        "against": f"{first['variant_of_full']}, {first['policy_of_full']}" if is_compared else None,
        "lost": lost.value,
        "lost_error": lost.error,
        "lost_lower": lost.lower,
        "lost_upper": lost.upper,
        "margin": margin,
        "standing": lost.standing(margin),
        "carried": lost.reach if is_compared else math.nan,
        "contexts_needed": lost.contexts_needed(margin) if is_compared else None,
        "seeds": len(parts[0]),
        "seeds_worse": lost.num_seeds_above if is_compared else math.nan,
        **sizes / weights.sum(),
        **weights.sum() / entries,
        "share": sizes["bytes_per_token"] / weights.sum() / full["bytes_per_token_of_full"],
        "peak_bytes": group["peak_bytes"].max(),
        "samples": int(sum(rows["num_samples"].iloc[0] for rows in parts)),
        "contexts": value.num_contexts,
        "keys": list(group["key"]),
    }


def _value_of(rows: pandas.DataFrame) -> Estimate:
    """Estimate a task's metric over seeds, with the task's own errors where no samples are kept."""
    value, by_seed = math.fsum(rows["value"]) / len(rows), tuple(rows["value"])
    if rows["samples"].map(bool).all():
        return replace(estimate([*rows["samples"]], rows["contexts"].iloc[0]), value=value, by_seed=by_seed)
    return Estimate(value, (rows["error"] ** 2).mean(skipna=False) / len(rows), by_seed=by_seed)


def _lost(rows: pandas.DataFrame) -> Estimate:
    """Estimate the loss against the full cache over seeds; without a value where it is unknown, or these are it."""
    if rows["key_of_full"].isna().any() or (rows["key_of_full"] == rows["key"]).all():
        return Estimate(math.nan)
    if rows[["samples", "samples_of_full"]].map(bool).all(axis=None):
        return _difference(rows, "samples", "samples_of_full")
    return difference(rows[["value"]], rows[["value_of_full"]], higher_is_better=bool(rows["higher_is_better"].iloc[0]))


def _difference(rows: pandas.DataFrame, column: str, other: str) -> Estimate:
    """Estimate how much worse the samples of one column are than those of another, over seeds."""
    first = rows.iloc[0]
    return difference([*rows[column]], [*rows[other]], first["contexts"], bool(first["higher_is_better"]))


def paired(measured: pandas.DataFrame, others: pandas.DataFrame) -> Estimate:
    """Estimate how much worse measurements of one metric are than others of the same samples, over their seeds.

    Args:
        measured: of `Store.frame`, one method's; each is paired with the other of its seed, if there is one.
        others: of another method. Where they have more seeds than `measured`, as three retrofits beside a policy on one
            model, each of them is paired instead.
    Raises:
        ValueError: none are of the same samples.
    """
    both = measured.merge(others[[*PAIRED, *OF_FULL]], on=PAIRED, suffixes=("", "_of_full"))
    each = "key_of_full" if both["key_of_full"].nunique() > both["key"].nunique() else "key"
    same_seed = both["seed_of_full"] == both["seed"]
    both = both[same_seed | ~same_seed.groupby(both[each]).transform("any")].drop_duplicates(each, keep="last")
    if both.empty:
        raise ValueError("they have no samples in common")
    return mean_of([_lost(rows) for _, rows in both.groupby("task", sort=False)])


def beside_baselines(
    frame: pandas.DataFrame, reference: str | None = None, metrics: Sequence[str] | None = None
) -> pandas.DataFrame:
    """Compare every compressed model with every training-free method in as many bytes, seed by seed.

    Of a method's budgets it is the nearest within `SAME_BYTES`, or else the next larger one up to `WHOLE_PAGES`.

    Returns:
        Columns: `variant`, `task` (or benchmark, the mean of several), `metric`, `baseline` (the training-free method),
        `baseline_value`, `baseline_error`, `baseline_lost` (how much worse than the full cache it is in these bytes),
        `baseline_bytes` (over the model's), `gap` (how much worse the baseline is than the model: positive is for the
        model), `gap_error`, `gap_lower`, `gap_upper`, `seeds`, `seeds_ahead` (in which the model is better), `is_best`
        (of all baselines the one that loses least; chosen on these data, which favors the baseline).
    """
    measured = _beside_full(frame, reference, metrics)
    by = ["variant", "shown", "task_key", *(["metric"] if metrics is not None else [])]
    learned = measured[measured["learned"] & measured["budget"].isna()]
    learned = learned.assign(seeds=learned.groupby([*by, "task", "metric"])["key"].transform("size"))
    learned = learned[learned[["samples", "samples_of_full"]].map(bool).all(axis=1)]
    methods = measured[~measured["is_full"] & measured["samples"].map(bool)]
    methods = methods[[*PAIRED, "model", "policy", "value", "samples", "bytes_per_token"]]
    left, right = [*PAIRED, "model_of_full"], [*PAIRED, "model"]
    near = learned.merge(methods, left_on=left, right_on=right, suffixes=("", "_of_method"))
    over = near["bytes_per_token_of_method"] / near["bytes_per_token"]
    is_more = ~over.between(1 / SAME_BYTES, SAME_BYTES)
    near = near.assign(over=over, is_more=is_more, distance=numpy.log(over).abs())
    near = near[~is_more | over.between(1, WHOLE_PAGES)].sort_values(["is_more", "distance"], kind="stable")
    near = near.drop_duplicates(["key", "metric", "policy_of_method"])
    lines = []
    for (variant, shown, *_, baseline), rows in near.groupby([*by, "policy_of_method"], sort=False):
        parts = [part for _, part in rows.groupby("task", sort=False)]
        is_whole = set(rows["members"].iloc[0]) <= set(rows["task"])
        if not is_whole or any(len(part) < part["seeds"].iloc[0] for part in parts):
            continue
        metric = rows["metric"].iloc[0] if rows["metric"].nunique() == 1 else "mean"
        values = [part.assign(value=part["value_of_method"], samples=part["samples_of_method"]) for part in parts]
        value = mean_of([_value_of(part) for part in values])
        lost = mean_of([_difference(part, "samples_of_method", "samples_of_full") for part in parts])
        gap = mean_of([_difference(part, "samples_of_method", "samples") for part in parts])
        line = [variant, shown, metric, baseline, value.value, value.error, lost.value, rows["over"].mean()]
        lines.append([*line, gap.value, gap.error, gap.lower, gap.upper, len(parts[0]), gap.num_seeds_above])
    beside = pandas.DataFrame(lines, columns=BESIDE)
    least = beside.groupby(["variant", "task", "metric"])["baseline_lost"].transform("min")
    return beside.assign(is_best=beside["baseline_lost"] == least)


def pareto_front(summary: pandas.DataFrame) -> list[int]:
    """Return the labels of a task's lines on the Pareto front of bytes and quality, the cheapest first."""
    worse = summary["value"].where(~summary["higher_is_better"].astype(bool), -summary["value"])
    front: list[Any] = []
    for label in summary.assign(worse=worse).sort_values(["bytes_per_token", "worse"]).index:
        if not front or worse[label] < worse[front[-1]]:
            front.append(label)
    return front
