"""Statistical comparison of methods: the only code that compares measurements.

* Methods are paired sample by sample: only measurements with one `samples_key` are compared.
* Samples of one context (a file, a text) and models of one seed are no independent evidence: errors are clustered by
  both. Bounds are Student's: of the contexts' part with their degrees of freedom, of the seeds' part with theirs.
* "worse" and "as good" are claims at 95 % each: the difference's lower bound is above 0, or its upper bound within the
  margin. All else is "unknown", and so is everything whose spread is: one sample, one context. Of answers 3 in n may
  differ though none of n contexts does: no bound is nearer than that, so that "as good" needs 3 / margin contexts.
* Equal memory is bytes over all scored positions, within `SAME_BYTES`, as measured: nothing is interpolated (whole
  pages may leave a baseline a little more, which is told). The budget `bytes:NAME` measures methods in as many;
  without such a measurement a method has no figure.

`summarize` makes one line of each method, budget, task and metric, over its seeds; `beside_baselines` puts compressed
models beside training-free methods in their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy
import pandas
from scipy.special import stdtrit

from dmc.results.equal_bytes import KIND, SAME_BYTES, WHOLE_PAGES, bytes_budget, share_of

CONFIDENCE = 0.95
"""Confidence of each bound, one-sided."""
MARGIN = 0.02
"""Largest loss that counts as "as good": nats per token, or share of answers; relative for metrics above 1."""
RATIO_TOLERANCE = 0.9
"""Share of the requested ratio from which a target counts as met."""
Standing = Literal["as good", "worse", "unknown", ""]
Seeds = Sequence[Sequence[float]] | numpy.ndarray
"""Values of samples by seed; all seeds have the same samples."""


@dataclass(frozen=True)
class Estimate:
    """A mean over samples and seeds."""

    value: float
    error: float | None
    """Standard error; None: unknown, nothing can be claimed."""
    reach: float = math.inf
    """Distance between the value and its bounds."""
    num_contexts: int = 0
    by_seed: tuple[float, ...] = ()
    of_contexts: tuple[float, float] | None = None
    """Variance over contexts, and its degrees of freedom: the part that tasks of the same seeds do not share."""
    floor: float = 0.0
    """Minimum distance of the bounds, whatever the spread."""

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
        return sum(each > 0 for each in self.by_seed)

    def contexts_needed(self, margin: float) -> int | None:
        """Return the contexts needed for "as good" if no context shows a loss and there are too few."""
        too_few = self.error is not None and self.value <= 0 and self.floor > margin
        return math.ceil(3 / margin) if too_few and self.standing(margin) == "unknown" else None

    def standing(self, margin: float) -> Standing:
        """Return what a loss shows: "as good" up to the margin, "worse", or "unknown"."""
        if self.error is None:
            return "unknown"
        if self.upper <= margin:
            return "as good"
        return "worse" if self.lower > 0 else "unknown"


def estimate(values: Seeds, contexts: Sequence[Hashable] = (), are_answers: bool = False) -> Estimate:
    """Estimate a mean, its error clustered by context and by seed.

    The two variances are added, which counts the variance within a context and seed twice: with few seeds this is
    conservative.

    Args:
        values: see `Seeds`.
        contexts: context of each sample; empty: each sample has its own.
        are_answers: whether they are (differences of) scores from 0 to 1, such as right or wrong answers. Where all of
            n agree, 3 in n may still differ, at 95 %: the bound is never nearer.
    """
    found = numpy.asarray(values, dtype=float)
    samples = found.shape[1]
    if not samples:
        return Estimate(math.nan, None)
    mean, by_seed = float(found.mean()), found.mean(1)
    members = numpy.unique(_codes(contexts or range(samples)), return_inverse=True)[1]
    sizes = numpy.bincount(members)
    if len(sizes) < 2:
        return Estimate(mean, None, num_contexts=len(sizes), by_seed=tuple(by_seed))
    parts = numpy.bincount(members, found.mean(0) - mean) / (samples - sizes)  # without each context: the jackknife
    of_contexts = (len(sizes) - 1) / len(sizes) * float(parts @ parts)
    degrees = max(1.0, samples**2 / float(sizes @ sizes) - 1)  # uneven contexts count as fewer even ones
    floor = 3 / len(sizes) if are_answers else 0.0
    return _with_seeds(mean, (of_contexts, degrees), floor, len(sizes), tuple(map(float, by_seed)))


def _with_seeds(
    value: float, contexts: tuple[float, float], floor: float, num: int, by_seed: tuple[float, ...]
) -> Estimate:
    """Add the variance of seeds to that of `num` contexts, each with its own degrees of freedom.

    Each is stretched by its own quantile: one of their sum is too small where two seeds happen to be alike.
    """
    of_contexts, degrees = contexts
    seeds, reach = len(by_seed), max(float(stdtrit(degrees, CONFIDENCE)) ** 2 * of_contexts, floor**2)
    of_seeds = float(numpy.var(by_seed, ddof=1)) / seeds if seeds > 1 else 0.0
    reach += float(stdtrit(seeds - 1, CONFIDENCE)) ** 2 * of_seeds if of_seeds else 0.0
    error = math.sqrt(of_contexts + of_seeds)
    return Estimate(value, error, math.sqrt(reach), num, by_seed, contexts, floor)


def _codes(contexts: Iterable[Hashable]) -> list[int]:
    known: dict[Hashable, int] = {}
    return [known.setdefault(each if isinstance(each, Hashable) else str(each), len(known)) for each in contexts]


def difference(own: Seeds, other: Seeds, contexts: Sequence[Hashable] = (), higher_is_better: bool = False) -> Estimate:
    """Estimate how much worse `own` is than `other`, paired by sample and seed.

    Scores from 0 to 1 for which higher is better are answers: see `estimate`.
    """
    first, second = numpy.asarray(own, dtype=float), numpy.asarray(other, dtype=float)
    if not higher_is_better:
        return estimate(first - second, contexts)
    return estimate(second - first, contexts, are_scores(first) and are_scores(second))


def are_scores(values: Any) -> bool:
    """Return whether all values are from 0 to 1."""
    return bool(((numpy.asarray(values) >= 0) & (numpy.asarray(values) <= 1)).all())


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """Average the estimates of several tasks, which share seeds but no contexts.

    What no context shows may all be in the task with the highest floor.
    """
    if len(estimates) == 1:
        return estimates[0]
    value, by_seed = math.fsum(each.value for each in estimates) / len(estimates), [each.by_seed for each in estimates]
    seeds = tuple(map(float, numpy.mean(by_seed, axis=0))) if len({*map(len, by_seed)}) == 1 else ()
    errors = [each.error for each in estimates if each.error is not None]
    if len(errors) < len(estimates):
        return Estimate(value, None, by_seed=seeds)
    parts = [
        (each.of_contexts if seeds else None) or (error**2, math.inf)
        for each, error in zip(estimates, errors, strict=True)
    ]
    total = sum(part for part, _ in parts)
    below = sum(part**2 / degrees for part, degrees in parts)
    of_contexts = total / len(parts) ** 2, total**2 / below if below else math.inf
    contexts, floor = sum(each.num_contexts for each in estimates), max(each.floor for each in estimates) / len(parts)
    return _with_seeds(value, of_contexts, floor, contexts, seeds)


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
        tokens, full cache), `task`, `metric`, `higher_is_better`, `split`, `question`; `value`, `value_error`;
        `against` (the full cache it is compared with), `lost` (how much worse it is, positive is worse), `lost_error`,
        `lost_lower`, `lost_upper`, `margin`, `standing`, `contexts_needed` (where too few agree), `seeds`,
        `seeds_worse`; `requested_ratio`, `requested_bytes_per_token`, `achieved_ratio`, `bytes_per_token`, `share` (of
        the full cache's bytes), `end_ratio`, `peak_bytes`, `samples`, `contexts`, `keys`.
    """
    cells = _Cells(frame, reference)
    whole = frame[(frame["by"] == "") & (frame["is_main"] if metrics is None else frame["metric"].isin(metrics))]
    lines = []
    if len(whole):
        tasks = whole["benchmark"].fillna(whole["task"])
        by = ["variant", "policy", "learned", "budget", *(["metric"] if metrics is not None else [])]
        for _, group in whole.assign(shown=tasks).groupby(["shown", *by], dropna=False, sort=False):
            for _, same in group.groupby("task_key", sort=False):
                if set(same["members"].iloc[0]) <= set(same["task"]):
                    lines.append(_line(same, cells))
    summary = pandas.DataFrame(lines)
    if len(summary):
        for name in ("budget", "split", "question"):
            summary[name] = pandas.Series([line[name] for line in lines], dtype=object)  # None stays None
    return summary


def _line(group: pandas.DataFrame, cells: _Cells) -> dict[str, Any]:
    first, parts = group.iloc[0], [cells.seeds(part) for _, part in group.groupby("task", sort=False)]
    values = [part.value for part in parts]
    value, lost = mean_of(values), [part.lost for part in parts]
    over = mean_of([each for each in lost if each is not None]) if None not in lost else None
    full, whole = ([part.of_full(name) for part in parts] for name in ("value", "bytes_per_token"))
    margin = margin_of(first["metric"], math.fsum(each or 0.0 for each in full) / len(full)) if over else math.nan
    weights = group["mean_tokens"] * group["num_samples"].clip(lower=1)
    size, wanted = (
        float((group[name] * weights).sum(skipna=False) / weights.sum())
        for name in ("bytes_per_token", "requested_bytes_per_token")
    )
    names = ("variant", "policy", "learned", "is_full", "budget", "metric", "higher_is_better", "split", "question")
    asked = asked_of(first)
    own = first["learned"] and first["budget"] is None
    method = f"{first['variant']}, {'learned' if own else first['policy']}"
    return {
        "title": method if first["is_full"] else f"{method}, {asked}",
        "method": method,
        **{name: first[name] for name in names},
        "metric": first["metric"] if group["metric"].nunique() == 1 else "mean",
        "asked": asked,
        "task": first["benchmark"] or first["task"],
        "value": value.value,
        "value_error": value.error,
        "against": None if over is None else parts[0].against,
        "lost": over and over.value,
        "lost_error": over and over.error,
        "lost_lower": over and over.lower,
        "lost_upper": over and over.upper,
        "margin": margin,
        "standing": "" if over is None else over.standing(margin),
        "contexts_needed": over.contexts_needed(margin) if over else None,
        "seeds": len(parts[0].values),
        "seeds_worse": over and over.num_seeds_above,
        "requested_ratio": float(weights.sum() / (weights / group["requested_ratio"]).sum()),
        "achieved_ratio": float(weights.sum() / (weights / group["achieved_ratio"]).sum()),
        "bytes_per_token": size,
        "requested_bytes_per_token": wanted,
        "share": None if None in whole else size * len(whole) / math.fsum(each or 0.0 for each in whole),
        "end_ratio": float(weights.sum() / (weights / group["end_ratio"]).sum()),
        "peak_bytes": group["peak_bytes"].max(),
        "samples": int(sum(part.rows["num_samples"].iloc[0] for part in parts)),
        "contexts": value.num_contexts,
        "keys": list(group["key"]),
    }


def asked_of(row: Any) -> str:
    """Format a method's budget: CR 4, 128 tokens, bytes of retrofit, 25% of the bytes, or the full cache."""
    if row["is_full"]:
        return "full cache"
    kind, _, number = str(row["budget"]).partition(":")
    if kind == "tokens":
        return f"{number} tokens"
    if kind == KIND:
        return f"bytes of {number}" if (share := share_of(number)) is None else f"{share:.4g} of the bytes"
    return f"CR {row['requested_ratio']:g}"


@dataclass(frozen=True)
class _Seeds:
    """One method at one budget on one task, over seeds, with each seed's full cache."""

    rows: pandas.DataFrame
    full: list[pandas.Series | None]
    """Full cache of each seed; None: there is none on the same samples."""

    @property
    def values(self) -> list[float]:
        return list(self.rows["value"])

    @property
    def samples(self) -> list[list[float]]:
        return [] if any(not each for each in self.rows["samples"]) else list(self.rows["samples"])

    @property
    def contexts(self) -> list[Any]:
        return list(self.rows["contexts"].iloc[0])

    @property
    def against(self) -> str | None:
        """Name of the full cache; None without one."""
        return next((f"{each['variant']}, {each['policy']}" for each in self.full if each is not None), None)

    def of_full(self, name: str) -> float | None:
        """Average a column of the full caches; None where a seed has none."""
        known = [each[name] for each in self.full if each is not None]
        return sum(known) / len(known) if known and len(known) == len(self.full) else None

    @property
    def lost(self) -> Estimate | None:
        """Loss against the full cache; None without one, or for that cache itself."""
        full = [each for each in self.full if each is not None]
        if len(full) < len(self.full) or all(
            each["key"] == key for each, key in zip(full, self.rows["key"], strict=True)
        ):
            return None
        others, higher = [each["samples"] for each in full], bool(self.rows["higher_is_better"].iloc[0])
        if not self.samples or any(not each for each in others):
            values = [value - each["value"] for value, each in zip(self.values, full, strict=True)]
            values = [-each for each in values] if higher else values
            return Estimate(sum(values) / len(values), None, by_seed=tuple(values))
        return difference(self.samples, others, self.contexts, higher)

    @property
    def value(self) -> Estimate:
        """The task's metric, with the task's own error if no samples are kept."""
        value = math.fsum(self.values) / len(self.values)
        if self.samples:
            return replace(estimate(self.samples, self.contexts), value=value, by_seed=tuple(self.values))
        errors = [each for each in self.rows["error"] if each == each]
        error = math.hypot(*errors) / len(errors) if len(errors) == len(self.values) else None
        return Estimate(value, error, by_seed=tuple(self.values))


class _Cells:
    """A frame with lookups of the cells to compare."""

    def __init__(self, frame: pandas.DataFrame, reference: str | None) -> None:
        self.frame, self.reference = frame, reference
        self.whole = frame[frame["by"] == ""]
        self.full = self.whole[self.whole["is_full"]]
        self._full_of_task = dict(iter(self.full.groupby(["task", "metric", "task_key"])))

    def seeds(self, rows: pandas.DataFrame) -> _Seeds:
        """Group the seeds of one task: the newest row of each model, if on the same samples as the newest row."""
        rows = rows.drop_duplicates("model", keep="last")
        rows = rows[rows["samples_key"].eq(rows["samples_key"].iloc[-1]) | rows["samples_key"].isna()]
        return _Seeds(rows, [self.full_of(row) for _, row in rows.iterrows()])

    def full_of(self, row: pandas.Series) -> pandas.Series | None:
        """Find the full cache of a row's model, or of the reference for compressed models (if given, for all)."""
        same = self._full_of_task.get((row["task"], row["metric"], row["task_key"]), self.full[:0])
        same = same[numpy.array([key == row["samples_key"] for key in same["samples_key"]], dtype=bool)]
        if not row["learned"] and not (row["is_full"] and self.reference):
            same = same[same["model"] == row["model"]]
        else:
            wanted = self.reference or row["reference"]
            if wanted is not None:
                same = same[(same["model"] == wanted) | (same["named"] == wanted) | (same["variant"] == wanted)]
            if row["seed"] is not None and row["seed"] == row["seed"] and (same["seed"] == row["seed"]).any():
                same = same[same["seed"] == row["seed"]]
        return same.iloc[-1] if same["model"].nunique() == 1 else None

    def baselines_of(self, row: pandas.Series, full: pandas.Series) -> pandas.DataFrame:
        """Find every policy on a full cache's model and samples at the budget that took a row's bytes, by policy.

        The budget is the nearest within `SAME_BYTES`, or else the next larger one up to `WHOLE_PAGES`.
        """
        names = ["model", "task", "metric", "task_key", "samples_key"]
        same = self.whole[(self.whole[names] == full[names]).all(axis=1) & ~self.whole["is_full"]]
        same = same.drop_duplicates(["policy", "budget"], keep="last")
        over = same["bytes_per_token"] / row["bytes_per_token"]
        is_same = over.between(1 / SAME_BYTES, SAME_BYTES)
        same = same.assign(over=over, is_more=~is_same, distance=numpy.log(over).abs())
        near = same[(is_same | over.between(1, WHOLE_PAGES)) & same["samples"].astype(bool)]
        return near.sort_values(["is_more", "distance"], kind="stable").drop_duplicates("policy").set_index("policy")


def beside_baselines(
    frame: pandas.DataFrame, reference: str | None = None, metrics: Sequence[str] | None = None
) -> pandas.DataFrame:
    """Compare every compressed model with every training-free method in as many bytes, seed by seed.

    Returns:
        Columns: `variant`, `task`, `metric`, `baseline` (the training-free method), `baseline_lost` (how much worse
        than the full cache it is in these bytes), `baseline_bytes` (over the model's), `gap` (how much worse the
        baseline is than the model: positive is for the model), `gap_error`, `gap_lower`, `gap_upper`, `standing` of
        the model beside the baseline, `seeds`, `seeds_ahead` (in which the model is better), `is_best` (of all
        baselines the one that loses least; chosen on these data, which favors the baseline).
    """
    cells = _Cells(frame, reference)
    whole = cells.whole[cells.whole["learned"] & cells.whole["budget"].isna()]
    whole = whole[whole["is_main"] if metrics is None else whole["metric"].isin(metrics)]
    lines: list[dict[str, Any]] = []
    for (variant, task, metric, _), rows in whole.groupby(["variant", "task", "metric", "task_key"], sort=False):
        part = cells.seeds(rows)
        if not part.samples or any(full is None or not full["samples"] for full in part.full):
            continue
        full = [each for each in part.full if each is not None]
        near = [cells.baselines_of(row, each) for (_, row), each in zip(part.rows.iterrows(), full, strict=True)]
        higher, margin, found = bool(rows["higher_is_better"].iloc[0]), margin_of(metric, float(full[0]["value"])), []
        for policy in near[0].index:
            if not all(policy in each.index for each in near):
                continue
            values = [each.loc[policy, "samples"] for each in near]
            gap = difference(values, part.samples, part.contexts, higher)
            lost = difference(values, [each["samples"] for each in full], part.contexts, higher)
            line = {"variant": variant, "task": task, "metric": metric, "baseline": policy, "baseline_lost": lost.value}
            line["baseline_bytes"] = float(numpy.mean([each.loc[policy, "over"] for each in near]))
            line |= {"gap": gap.value, "gap_error": gap.error, "gap_lower": gap.lower, "gap_upper": gap.upper}
            line |= {"standing": replace(gap, value=-gap.value).standing(margin)}
            found.append(line | {"seeds": len(near), "seeds_ahead": gap.num_seeds_above})
        best = min((each["baseline_lost"] for each in found), default=None)
        lines += [each | {"is_best": each["baseline_lost"] == best} for each in found]
    return pandas.DataFrame(lines)


def meets_target(row: Any) -> bool:
    """Return whether a line of a summary holds what was requested: a ratio within the tolerance, or as many bytes."""
    if bytes_budget(row["budget"]) is not None:
        over = row["bytes_per_token"] / row["requested_bytes_per_token"]
        return not (over < 1 / SAME_BYTES or over > SAME_BYTES)  # earlier versions' rows do not tell what was requested
    return bool(max(row["achieved_ratio"], row["end_ratio"]) >= RATIO_TOLERANCE * row["requested_ratio"])


def pareto_front(summary: pandas.DataFrame) -> list[int]:
    """Return the labels of a task's lines on the Pareto front of bytes and quality, the cheapest first."""
    worse = summary["value"].where(~summary["higher_is_better"].astype(bool), -summary["value"])
    front: list[Any] = []
    for label in summary.assign(worse=worse).sort_values(["bytes_per_token", "worse"]).index:
        if not front or worse[label] < worse[front[-1]]:
            front.append(label)
    return front
