"""Claims about methods, and whether the samples of a comparison carry them: `cr8 within 3 points of full at recall`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import pandas

from dmc.config.settings import suggest
from dmc.results.equal_bytes import WHOLE_PAGES, bytes_budget
from dmc.results.estimates import CONFIDENCE, POWER, Estimate
from dmc.results.measurement import FULL
from dmc.results.statistics import paired
from dmc.results.tables import LEAST_RATIO, meets_ratio
from dmc.results.verdict import Scale, is_too_wide

GRAMMAR = re.compile(
    r"(?P<subject>\S+) (?:within (?P<margin>\d+(?:\.\d+)?) (?P<unit>points?|nats) of|better than) (?P<other>\S+)"
    r" at (?:(?P<metric>\S+) of )?(?P<task>\S.*)"
)
EXPECTED = (
    "expected 'METHOD within NUMBER points of METHOD at TASK' (or nats), or 'METHOD better than METHOD at TASK'; "
    "METHOD is a model, full, POLICY, POLICY/BUDGET or MODEL/POLICY/BUDGET, TASK may be 'METRIC of TASK'"
)
RATIO_IN_NAME = re.compile(r"(?:^|[^a-z0-9])cr[_-]?(\d+(?:\.\d+)?)(?![a-z0-9])", re.IGNORECASE)
"""The ratio that a model's name claims: 8 for `cr8` and `best_cr8`."""
Standing = Literal["true", "false", "not carried", "not compressed"]


@dataclass(frozen=True)
class NamedMethod:
    """A line of a comparison, over its seeds."""

    variant: str
    policy: str
    budget: str | None
    """None: the full cache, or a model's learned gates."""
    is_full: bool

    @property
    def names(self) -> tuple[str, ...]:
        """What a claim may call it, the longest name first."""
        if self.budget is not None:
            end = f"{self.policy}/{self.budget}"
            return f"{self.variant}/{end}", end, f"{self.variant}/{self.policy}", self.policy
        return (f"{self.variant}/{FULL}", self.variant, FULL) if self.is_full else (self.variant,)


@dataclass(frozen=True)
class Claim:
    """One sentence that a comparison may show to be true or false."""

    text: str
    subject: str
    other: str
    task: str
    metric: str | None
    """None: the task's main one."""
    margin: float | None
    """Largest loss of the subject against the other, in the metric; None: it is better."""
    unit: str | None

    @classmethod
    def parse(cls, text: str) -> Claim:
        """Read a claim.

        Raises:
            ValueError: it is none.
        """
        found = GRAMMAR.fullmatch(" ".join(text.split()))
        if found is None:
            raise ValueError(f"claim={text!r}: {EXPECTED}")
        subject, margin, unit, other, metric, task = found.groups()
        if subject == other:
            raise ValueError(f"claim={text!r}: it compares {subject} with itself")
        unit = None if unit is None else unit.removesuffix("s")
        number = None if margin is None else float(margin) / (100 if unit == "point" else 1)
        return cls(found.string, subject, other, task, metric, number, unit)

    def check(self, methods: Iterable[NamedMethod], tasks: Mapping[str, str | None], reference: str | None) -> None:
        """Check before anything is measured that its names are those of a comparison, and its unit the metric's.

        Args:
            methods: those of the comparison.
            tasks: the main metric of each task, by its name; None: it is known when it is measured.
            reference: variant or model whose full cache `full` is.
        Raises:
            ValueError: a name is unknown, or stands for several methods; the metric is not in the claim's unit.
        """
        if self.task not in tasks:
            raise ValueError(
                f"claim={self.text!r}: {self.task!r} is no task of this audit; {suggest(self.task, tasks)}"
            )
        known = [*dict.fromkeys(methods)]
        if self._find(self.subject, known, reference) == self._find(self.other, known, reference):
            raise ValueError(f"claim={self.text!r}: it compares {self.subject} with itself")
        metric = self.metric or tasks[self.task]
        if self.unit is not None and metric is not None and (self.unit == "nat") != metric.endswith("loss"):
            raise ValueError(f"claim={self.text!r}: {metric} is not measured in {self.unit}s")

    def judge(self, frame: pandas.DataFrame, reference: str | None) -> Judgement:
        """Return whether measurements show it.

        Args:
            frame: of `Store.frame`.
            reference: see `check`.
        Raises:
            ValueError: a method or metric was not measured, or the metric is not in the claim's unit.
        """
        is_metric = frame["is_main"] if self.metric is None else frame["metric"] == self.metric
        lines = frame[(frame["task"] == self.task) & (frame["by"] == "") & is_metric]
        if lines.empty:
            known = frame[(frame["task"] == self.task) & (frame["by"] == "")]["metric"].unique()
            raise ValueError(f"claim={self.text!r}: {self.metric or 'its metric'} was not measured, but {[*known]}")
        methods = [
            NamedMethod(*values) for values in lines[["variant", "policy", "budget", "is_full"]].itertuples(index=False)
        ]
        sides = [self._find(name, [*dict.fromkeys(methods)], reference) for name in (self.subject, self.other)]
        subject, other = (lines[[method == side for method in methods]] for side in sides)
        scale = Scale.of(lines)
        if self.unit is not None and self.unit != ("point" if scale.is_share else scale.unit.strip().removesuffix("s")):
            raise ValueError(f"claim={self.text!r}: {scale.metric} is not measured in {self.unit}s")
        names = (self.subject, self.other)
        held = [
            AchievedRatio.of(*found)
            for found in zip(names, sides, (subject, other), strict=True)
            if not found[1].is_full
        ]
        try:
            return Judgement(self, paired(subject, other), scale, int(subject["num_samples"].iloc[0]), tuple(held))
        except ValueError as error:
            raise ValueError(f"claim={self.text!r}: {error}") from error

    def _find(self, name: str, methods: list[NamedMethod], reference: str | None) -> NamedMethod:
        found = [method for method in methods if name in method.names]
        if len(found) > 1 and name == FULL:
            found = [method for method in found if method.variant == reference] or found
        if not found:
            known = [method.names[0] for method in methods]
            raise ValueError(f"claim={self.text!r}: {name!r} is no method of this audit; {suggest(name, known)}")
        if len(found) > 1:
            which = " or ".join(method.names[0] for method in found)
            raise ValueError(f"claim={self.text!r}: {name!r} is not one method; say {which}")
        return found[0]


@dataclass(frozen=True)
class AchievedRatio:
    """How much a compressed method of a claim held, in the model of its variant that compressed least."""

    name: str
    ratio: float
    """CR over the scored positions, or at the end of samples where that is higher."""
    claimed: float | None
    """CR that its name, its budget or its training claims; None: the claim is of bytes, or counts decisions alone."""
    bytes_over: float
    """Bytes over those of a budget in bytes; NaN: another kind of budget."""
    unread: int
    """Entries that it held and left unread, over all steps: it claims fewer reads, not a smaller cache."""

    @classmethod
    def of(cls, name: str, method: NamedMethod, lines: pandas.DataFrame) -> AchievedRatio:
        """Read what was held from a method's measurements of one metric."""
        first, in_name = lines.iloc[0], RATIO_IN_NAME.search(method.variant)
        if method.budget is None and in_name is not None:
            claimed: float | None = float(in_name[1])
        elif bytes_budget(method.budget) is not None or first["target_counts"] == "decided":
            claimed = None
        else:
            claimed = float(lines["requested_ratio"].max())
        ratio = float(lines[["achieved_ratio", "end_ratio"]].max(axis=1).min())
        over = float((lines["bytes_per_token"] / lines["requested_bytes_per_token"]).max())
        return cls(name, ratio, claimed, over, int(lines["entries_unread"].sum()))

    @property
    def is_as_claimed(self) -> bool:
        """Whether it held as much of the ratio as `meets_ratio` asks for, or a budget in bytes to whole pages."""
        if self.unread or self.claimed is None:
            return bool(self.unread) or not self.bytes_over > WHOLE_PAGES
        return meets_ratio(self.ratio, self.claimed)

    def __str__(self) -> str:
        text = f"{self.name} held CR {self.ratio:.2f}"
        if not math.isnan(self.bytes_over):
            return f"{text} in {self.bytes_over:.0%} of the bytes asked for"
        text += "" if self.claimed is None else f" of {self.claimed:.3g} claimed"
        return f"{text}, and left {self.unread:,} entries unread" if self.unread else text


@dataclass(frozen=True)
class Judgement:
    """What measurements say of a claim."""

    claim: Claim
    lost: Estimate
    """How much worse the subject is than the other."""
    scale: Scale
    num_samples: int
    held: tuple[AchievedRatio, ...]
    """What its compressed methods held."""

    @property
    def standing(self) -> Standing:
        """Whether it is true or false with 95 % confidence, or neither; what was not compressed carries no claim."""
        if not all(held.is_as_claimed for held in self.held):
            return "not compressed"
        margin = self.claim.margin
        if self.lost.upper <= margin if margin is not None else self.lost.upper < 0:
            return "true"
        return "false" if self.lost.lower > (margin or 0.0) else "not carried"

    @property
    def contexts_needed(self) -> int | None:
        """Contexts that would decide it at `POWER` if the difference is as measured; None: no number is known to."""
        return self.lost.contexts_needed(abs((self.claim.margin or 0.0) - self.lost.value), POWER)

    def __str__(self) -> str:
        lost, scale, contexts = self.lost, self.scale, self.lost.num_contexts
        difference, sure = scale.difference(lost.value, lost.error), f"with {100 * CONFIDENCE:.0f} % confidence"
        kind = "samples" if contexts == self.num_samples else "texts"
        over = f"{contexts:,} {kind}" if contexts != 1 else f"a single {kind[:-1]}"
        held = "".join(f"; {found}" for found in self.held)
        if self.standing == "not compressed":
            return f"not compressed: {self.claim.text}{held}; at least {LEAST_RATIO:.0%} of a CR must be held."
        if self.standing != "not carried":
            side = f"at most {scale.bound(lost.upper)} worse"
            if lost.upper < 0 or self.standing == "false":
                side = f"at least {self._least}"
            return f"{self.standing}: {self.claim.text}: {difference}, {side} {sure} ({over}){held}."
        if self.claim.margin is not None and is_too_wide(lost.reach, self.claim.margin):
            carried = f"{over} cannot tell"
        elif math.isinf(lost.reach):
            carried = f"{over} carries no margin" if contexts else "without its samples no margin is known"
        else:
            carried = f"{over} carry a margin of {scale.bound(lost.reach)}"
        needed = self.contexts_needed
        if needed is None:
            more = "how many would is unknown: give more texts, or more seeds"
        else:
            more = f"it would need {needed:,} {kind}"
            more += "" if kind == "samples" else f" ({math.ceil(needed * self.num_samples / contexts):,} samples)"
        return f"not carried: {self.claim.text}: {difference}; {carried}; {more}{held}."

    @property
    def _least(self) -> str:
        """Return the bound that is nearer to no difference."""
        is_better = self.lost.upper < 0
        bound = self.scale.bound(-self.lost.upper if is_better else self.lost.lower, is_lower=True)
        return f"{bound} {'better' if is_better else 'worse'}"
