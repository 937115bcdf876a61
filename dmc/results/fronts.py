"""What methods can get out of the same memory when the number of chains is free: fronts over the cost of a problem.

A *setting* is a method with a number of chains: one line of a task with votes (`tasks/voting.py`). It costs the peak
bytes of all chains of a problem together, or the bytes that their steps read. In every budget a *family* (the full
cache, learned gates, training-free methods) takes the most accurate of its settings that cost no more.

Whoever takes the best of several settings on the problems that are reported favors the family with more settings.
Problems are therefore halved, and what one half is answered with is chosen on the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy
import pandas

from dmc.results.statistics import Estimate, difference, estimate

COSTS = {"peak_bytes": "peak cache bytes of a problem", "bytes_read": "cache bytes read for a problem"}
"""Metrics that are costs, and what they are called."""
FAMILIES = ("full cache", "learned gates", "training-free")
BUDGETS = 13
"""Number of budgets, evenly spaced in their logarithm from the cheapest setting of the full cache to its dearest."""
CHOICE = "The most accurate setting that costs no more, chosen on the other half of the problems."
AHEAD = 0.08
"""Difference of accuracy that counts as ahead."""


@dataclass(frozen=True)
class Setting:
    """A method with a number of chains."""

    title: str
    family: str
    cost: float
    """Mean over problems and seeds."""
    right: numpy.ndarray
    """[seeds, problems]: whether the vote is right."""


@dataclass(frozen=True)
class Front:
    """The most accurate settings of each family in every budget."""

    task: str
    cost: str
    """A metric of `COSTS`."""
    settings: list[Setting]
    budgets: numpy.ndarray
    """[budgets], in bytes."""
    contexts: Sequence[int] = field(repr=False)
    """Context of each problem."""

    @property
    def families(self) -> list[str]:
        """The families that have settings."""
        return [name for name in FAMILIES if any(setting.family == name for setting in self.settings)]

    def right(self, family: str) -> numpy.ndarray:
        """Return whether a family answers each problem in each budget: [budgets, seeds, problems].

        Where no setting is cheap enough, nothing is answered.
        """
        settings = [setting for setting in self.settings if setting.family == family]
        found = numpy.zeros((len(self.budgets), *settings[0].right.shape))
        parity = numpy.unique(numpy.asarray(self.contexts), return_inverse=True)[1] % 2
        for place, budget in enumerate(self.budgets):
            there = sorted((s for s in settings if s.cost <= budget * (1 + 1e-9)), key=lambda setting: setting.cost)
            for half in (0, 1) if there else ():
                chosen = max(there, key=lambda setting: setting.right[:, parity != half].mean())
                found[place][:, parity == half] = chosen.right[:, parity == half]
        return found

    def margins(self, family: str) -> list[Estimate]:
        """Estimate, for every budget, how many more problems a family answers than the full cache."""
        other = self.right(FAMILIES[0])
        return [
            difference(full, mine, self.contexts, higher_is_better=True)
            for full, mine in zip(other, self.right(family), strict=True)
        ]

    def area(self, family: str) -> Estimate:
        """Estimate the mean accuracy over all budgets."""
        return estimate(self.right(family).mean(0), self.contexts, are_answers=True)

    def area_margin(self, family: str) -> Estimate:
        """Estimate how much larger a family's area is than that of the full cache."""
        return difference(self.right(FAMILIES[0]).mean(0), self.right(family).mean(0), self.contexts, True)

    def sentences(self) -> list[str]:
        """Say for each family but the full cache in how many budgets it is ahead, and by how much over all."""
        found = []
        for family in self.families[1:]:
            margins, area = self.margins(family), self.area_margin(family)
            ahead = sum(margin.value >= AHEAD for margin in margins)
            behind = sum(margin.upper < 0 for margin in margins)
            found.append(
                f"{self.task}, at equal {COSTS[self.cost]}: {family} at least {100 * AHEAD:.0f} points above the full "
                f"cache in {ahead} of {len(margins)} budgets, below it beyond the error in {behind}; on average over "
                f"the budgets {100 * area.value:+.1f} ± {100 * area.error:.1f} points."
            )
        return found

    def table(self) -> pandas.DataFrame:
        """Return texts: a line for each budget, and one for the area; accuracies and margins of the families."""
        lines = [{"method": "", COSTS[self.cost]: f"{budget:,.0f}"} for budget in self.budgets]
        lines.append({"method": "", COSTS[self.cost]: "mean over budgets"})
        for family in self.families:
            each = [estimate(right, self.contexts, are_answers=True) for right in self.right(family)]
            for line, found in zip(lines, [*each, self.area(family)], strict=True):
                line[family] = f"{100 * found.value:.1f} ± {100 * found.error:.1f} %"
        for family in self.families[1:]:
            for line, found in zip(lines, [*self.margins(family), self.area_margin(family)], strict=True):
                line[f"{family}, over the full cache"] = f"{100 * found.value:+.1f} ± {100 * found.error:.1f}"
        return pandas.DataFrame(lines, dtype=object).set_index("method")


def fronts_of(frame: pandas.DataFrame) -> list[Front]:
    """Find the fronts of all tasks with votes, over both costs.

    Settings share a front if they have the same problems; each needs all seeds that the full cache has there.

    Args:
        frame: of `Store.frame`.
    """
    of_tasks = frame[frame["by"] == ""]
    values = of_tasks.pivot_table(index="key", columns="metric", values="value")
    if not {"single_chain", *COSTS} <= {*values}:
        return []
    is_voted = of_tasks["is_main"] & of_tasks["key"].isin(values.index[values["single_chain"].notna()])
    voted = of_tasks[is_voted & of_tasks["samples"].map(bool)].join(values[[*COSTS]], on="key", rsuffix="_of_problem")
    fronts = []
    for _, same in voted.groupby("samples_key", sort=False):
        settings = {cost: _settings(same, cost if cost not in frame else f"{cost}_of_problem") for cost in COSTS}
        for cost, found in settings.items():
            costs = [setting.cost for setting in found if setting.family == FAMILIES[0]]
            if len({setting.family for setting in found}) > 1 and len({*costs}) > 1:
                budgets = numpy.geomspace(min(costs), max(costs), BUDGETS)
                contexts = same["contexts"].iloc[0] or [*range(len(same["samples"].iloc[0]))]
                fronts.append(Front(" + ".join(dict.fromkeys(same["task"])), cost, found, budgets, contexts))
    return fronts


def _settings(same: pandas.DataFrame, cost: str) -> list[Setting]:
    settings = []
    num_seeds = same[same["is_full"]].groupby("task")["seed"].nunique(dropna=False).min()
    for (variant, policy, budget, task), rows in same.groupby(["variant", "policy", "budget", "task"], dropna=False):
        rows = rows.drop_duplicates("seed", keep="last").sort_values("seed")
        if len(rows) == num_seeds:
            first = rows.iloc[0]
            family = FAMILIES[0] if first["is_full"] else FAMILIES[1] if first["learned"] else FAMILIES[2]
            title = f"{variant}, {task}" if first["learned"] else f"{policy}, {task}"
            title += f", {budget}" if isinstance(budget, str) else ""
            settings.append(Setting(title, family, float(rows[cost].mean()), numpy.array([*rows["samples"]])))
    return settings
