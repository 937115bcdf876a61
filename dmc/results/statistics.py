"""Statistical comparison of methods: the only code that compares measurements.

* Methods are paired sample by sample: only measurements with one `samples_key` are compared.
* Errors and bounds are those of `estimates.py`.
* Equal memory is bytes over all scored positions, within `SAME_BYTES`, as measured: nothing is interpolated (whole
  pages may leave a baseline a little more, and the table says so). The budget `bytes:NAME` measures methods in as many;
  without such a measurement a method has no figure.

`summarize` makes one line of each method, budget, task and metric, over its seeds; `beside_baselines` puts compressed
models beside training-free methods in their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy
import pandas

from dmc.results.equal_bytes import SAME_BYTES, WHOLE_PAGES, asked_of
from dmc.results.estimates import Estimate, difference, estimate, mean_of

MARGIN = 0.02
"""Largest loss that counts as "as good": nats per token, or share of answers; relative for metrics above 1."""
PAIRED = ["task", "metric", "task_key", "samples_key"]
"""Columns in which measurements agree that are paired sample by sample."""
OF_FULL = ["key", "model", "named", "variant", "policy", "seed", "value", "samples", "bytes_per_token"]
"""Columns of the full cache that a measurement is compared with."""
BESIDE = ["variant", "task", "metric", "baseline", "baseline_value", "baseline_error", "baseline_lost"]
BESIDE += ["baseline_bytes", "gap", "gap_error", "gap_lower", "seeds", "seeds_ahead"]


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
        `lost_lower`, `lost_upper`, `num_alike` (lines of its task and metric that are learned, or all that are not),
        `upper_of_best` (the bound if it was chosen among these), `margin`, `standing`, `carried` (the margin that the
        samples carry),
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
    lost = [line.pop("estimate") for line in lines]
    summary = pandas.DataFrame(lines)
    if len(summary):
        is_learned = summary["learned"] & summary["budget"].isna()
        alike = [summary["task"], summary["metric"], summary["is_full"], is_learned]
        summary["num_alike"] = summary.groupby(alike)["lost"].transform("size")
        found = zip(lost, summary["num_alike"], strict=True)
        summary["upper_of_best"] = [part.value + part.reach_of_best(num) for part, num in found]
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
        "estimate": lost,
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
        model), `gap_error`, `gap_lower`, `gap_upper` (below 0 the baseline is ahead, as the best of all of them),
        `seeds`, `seeds_ahead` (in which the model is better), `is_best` (of all baselines the one that loses least;
        chosen on these data, which favors the baseline).
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
    lines, gaps = [], []
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
        lines.append([*line, gap.value, gap.error, gap.lower, len(parts[0]), gap.num_seeds_above])
        gaps.append(gap)
    beside = pandas.DataFrame(lines, columns=BESIDE)
    of_model = beside.groupby(["variant", "task", "metric"])["baseline_lost"]
    found = zip(gaps, of_model.transform("size"), strict=True)
    upper = [gap.value + gap.reach_of_best(num) for gap, num in found]
    return beside.assign(gap_upper=upper, is_best=beside["baseline_lost"] == of_model.transform("min"))


def pareto_front(summary: pandas.DataFrame) -> list[int]:
    """Return the labels of a task's lines on the Pareto front of bytes and quality, the cheapest first."""
    worse = summary["value"].where(~summary["higher_is_better"].astype(bool), -summary["value"])
    front: list[Any] = []
    for label in summary.assign(worse=worse).sort_values(["bytes_per_token", "worse"]).index:
        if not front or worse[label] < worse[front[-1]]:
            front.append(label)
    return front
