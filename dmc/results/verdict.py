"""The verdict: for each task, what `statistics.py` found, in sentences.

The best learned model, or without one the best training-free method, stands beside its full cache and the best
training-free method in as many bytes. Where the samples do not show whether it is as good as the full cache, the margin
that they carry is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas

from dmc.results.equal_bytes import SAME_BYTES
from dmc.results.estimates import CONFIDENCE
from dmc.results.statistics import MARGIN, pareto_front

ACCURACY = ("exact_match", "acc")
"""Metrics that are the share of right answers."""
NO_QUALITY = ("share_held",)
"""Main metrics that describe a cache."""
TOO_WIDE = 10.0
"""Samples whose bounds are further from the mean than so many margins of "as good" cannot tell: no bound is said."""
FEWER = 0.75
"""Factor between the bytes of methods that are named beside the best one."""


@dataclass(frozen=True)
class Scale:
    """How a task's values are written: shares in percent, losses in nats, others as they are."""

    metric: str
    question: str | None
    is_share: bool

    @classmethod
    def of(cls, lines: pandas.DataFrame) -> Scale:
        """Choose the scale of all lines of a task and metric."""
        is_share = bool(lines["higher_is_better"].all() and lines["value"].between(0, 1).all())
        return cls(str(lines["metric"].iloc[0]), lines["question"].iloc[0], is_share)

    @property
    def unit(self) -> str:
        """Unit of values, with a space before it."""
        return " %" if self.is_share else " nats" if self.metric.endswith("loss") else ""

    @property
    def unit_of_difference(self) -> str:
        """Unit of differences, with a space before it."""
        return " points" if self.is_share else self.unit

    def number(self, value: float, error: float, spread: float) -> str:
        """Format a number and its error: percent with one decimal, others with two digits of a spread."""
        if self.is_share:
            form, value, error = ".1f", 100 * value, 100 * error
        else:
            form = f".{min(max(1 - math.floor(math.log10(spread) + 1e-9), 0), 4) if spread > 0 else 0}f"
        return format(value, form) + ("" if math.isnan(error) else f" ± {format(error, form)}")

    def value(self, value: float, error: float) -> str:
        """Format a value with its unit, in four digits."""
        return self.number(value, error, abs(value) / 100) + self.unit

    def difference(self, worse: float, error: float) -> str:
        """Format how much worse or better something is."""
        text = self.number(abs(worse), error, error if error > 0 else abs(worse)) + self.unit_of_difference
        return f"{text} {'better' if worse < 0 else 'worse'}" if worse else f"neither better nor worse ({text})"

    def bound(self, bound: float, is_lower: bool = False) -> str:
        """Format a bound, rounded to its safe side, up or down, to one decimal of percent or two digits."""
        shown = 100 * bound if self.is_share else bound
        digits = 1 if self.is_share or shown <= 0 else min(max(1 - math.floor(math.log10(shown)), 0), 4)
        tens = shown * 10**digits
        rounded = math.floor(tens + 1e-9) if is_lower else math.ceil(tens - 1e-9)
        return f"{rounded / 10**digits:.{digits}f}" + self.unit_of_difference

    def margin(self, margin: float) -> str:
        """Format the margin of "as good"."""
        return f"{100 * margin if self.is_share else margin:.3g}" + self.unit_of_difference

    def measured(self, value: float, error: float) -> str:
        """Format a value and what it is of: 95.3 % of hidden questions, a loss of 4.9 nats."""
        text = self.value(value, error)
        if self.is_share and self.metric in ACCURACY:
            return f"{text} of {self.question} questions" if self.question else f"{text} accuracy"
        return f"{self.metric.replace('_', ' ')} {text}"


def verdicts_of(summary: pandas.DataFrame, beside: pandas.DataFrame) -> Iterator[str]:
    """Yield the verdict of each task and metric.

    Args:
        summary: of `statistics.summarize`.
        beside: of `statistics.beside_baselines`.
    """
    for (task, metric), lines in summary.groupby(["task", "metric"], sort=False) if len(summary) else ():
        full, methods = lines[lines["is_full"]], lines[~lines["is_full"]]
        gates = methods[methods["learned"] & methods["budget"].isna()]
        smaller = methods[~(methods["share"] >= 1)]
        shown = gates if len(gates) else smaller if len(smaller) else methods
        if shown.empty or metric in NO_QUALITY:
            continue
        scale, front = Scale.of(lines), shown.loc[pareto_front(shown)[::-1]]
        if len(full) and scale.is_share and full["value"].max() <= 5 * MARGIN:
            most = full.loc[full["value"].idxmax()]
            reached = scale.measured(most["value"], most["value_error"])
            yield f"{task}: says nothing about compression: even a full cache reaches only {reached}."
            continue
        best, several = front.iloc[0], methods[~methods["learned"]]["variant"].nunique() > 1
        found = beside[(beside["task"] == task) & (beside["metric"] == metric) & (beside["variant"] == best["variant"])]
        baseline = found[found["is_best"]].iloc[-1] if len(gates) and found["is_best"].any() else None
        sentences = [_reached(best, full, baseline, scale, several), _against_full(best, scale)]
        sentences += [_against_baseline(baseline, scale), _in_fewer_bytes(front, scale, several)]
        yield f"{task}: " + " ".join(filter(None, sentences))


def _reached(
    best: pandas.Series, full: pandas.DataFrame, baseline: pandas.Series | None, scale: Scale, several: bool
) -> str:
    """Say what the best method, its full cache and the best baseline reach, and on how many samples."""
    parts = [f"{_name(best, several)}: {scale.measured(best['value'], best['value_error'])}{_memory(best)}"]
    same = full[full["title"] == best["against"]]
    if len(same):
        line = same.iloc[-1]
        parts.append(f"{line['variant']} with a full cache: {scale.value(line['value'], line['value_error'])}")
    else:
        parts.append("it is compared with no full cache")
    if baseline is not None:
        more = f" (+{100 * (baseline['baseline_bytes'] - 1):.0f} %)" if baseline["baseline_bytes"] > SAME_BYTES else ""
        value = scale.value(baseline["baseline_value"], baseline["baseline_error"])
        parts.append(f"best training-free method in as many bytes{more}: {baseline['baseline']}, {value}")
    elif best["learned"] and len(same):
        parts.append("no training-free method is compared in as many bytes")
    return f"{'; '.join(parts)} ({_samples(best)})." if best["samples"] else f"{'; '.join(parts)}."


def _against_full(line: pandas.Series, scale: Scale) -> str:
    """Say how far a method is from its full cache, or which margin the samples carry."""
    if pandas.isna(line["lost"]):
        return ""
    text = f"Against the full cache it is {scale.difference(line['lost'], line['lost_error'])}"
    if line["standing"] == "worse" or line["upper_of_best"] < 0:
        return f"{text}."
    if math.isfinite(line["upper_of_best"]) and not is_too_wide(line["carried"], line["margin"]):
        chosen = f" as the best of {line['num_alike']}" if line["num_alike"] > 1 else ""
        bound = scale.bound(line["upper_of_best"])
        text += f", and{chosen} at most {bound} worse with {100 * CONFIDENCE:.0f} % confidence"
    return f"{text}." if line["upper_of_best"] <= line["margin"] else f"{text}: {carried(line, scale)}."


def is_too_wide(reach: float, margin: float) -> bool:
    """Return whether bounds so far from the mean say nothing of a margin."""
    return math.isfinite(reach) and reach > TOO_WIDE * margin


def carried(line: pandas.Series, scale: Scale) -> str:
    """Say which margin the samples of a summary's line carry, and how many would carry the one of "as good"."""
    if math.isinf(line["carried"]):
        return "a single text carries no margin" if line["contexts"] else "without its samples no margin is known"
    samples = f"{line['contexts']:,} {_kind(line)}"
    needed = "more seeds" if pandas.isna(line["contexts_needed"]) else f"{line['contexts_needed']:,.0f}"
    if is_too_wide(line["carried"], line["margin"]):
        return f"{samples} cannot tell; by their spread {needed} would"
    text = f"{samples} carry a margin of {scale.bound(line['carried'])}"
    return text if line["carried"] <= line["margin"] else f"{text}; {scale.margin(line['margin'])} would need {needed}"


def _against_baseline(baseline: pandas.Series | None, scale: Scale) -> str:
    """Say how far the model is from the best baseline; `gap` is positive where the baseline is worse."""
    if baseline is None:
        return ""
    is_shown = baseline["gap_lower"] > 0 or baseline["gap_upper"] < 0
    difference = scale.difference(-baseline["gap"], baseline["gap_error"])
    return f"Against {baseline['baseline']} it is {difference}{'' if is_shown else ', which is not significant'}."


def _in_fewer_bytes(front: pandas.DataFrame, scale: Scale, several: bool) -> str:
    """Name those of the front that take far fewer bytes than the one before."""
    last, parts = front.iloc[0], list[str]()
    for _, line in front.iloc[1:].iterrows():
        if line["bytes_per_token"] <= FEWER * last["bytes_per_token"]:
            parts.append(f"{_name(line, several)}: {scale.value(line['value'], line['value_error'])}{_memory(line)}")
            last = line
    return f"In fewer bytes: {'; '.join(parts)}." if parts else ""


def _name(line: pandas.Series, several: bool) -> str:
    """Name a method and what it was asked for; `several` stock models are told apart."""
    asked = f" at {line['asked']}" if line["asked"].startswith("CR ") else f" ({line['asked']})"
    if line["learned"]:
        return line["variant"] + ("" if line["budget"] is None else f" with {line['policy']}") + asked
    return line["policy"] + (f" on {line['variant']}" if several else "") + asked


def _memory(line: pandas.Series) -> str:
    if not pandas.isna(line["share"]):
        return f" in {100 * line['share']:.{0 if line['share'] >= 0.1 else 1}f} % of the bytes"
    if not pandas.isna(line["bytes_per_token"]):
        return f" in {line['bytes_per_token']:,.0f} bytes per token"
    return f" holding CR {line['achieved_ratio']:.2f}"


def _samples(line: pandas.Series) -> str:
    """Say over what the errors are."""
    samples = f"{line['contexts']:,} {_kind(line)}"
    if 0 < line["contexts"] < line["samples"]:
        samples = f"{line['samples']:,} samples of {samples}"
    elif not line["contexts"]:
        samples = f"{line['samples']:,} samples"
    return f"{samples}, {line['seeds']} seeds" if line["seeds"] > 1 else f"{samples}, one model"


def _kind(line: Any) -> str:
    """Name contexts: samples, if each has its own."""
    word = "text" if line["contexts"] < line["samples"] else "sample"
    return word if line["contexts"] == 1 else f"{word}s"
