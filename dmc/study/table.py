"""What compression costs over the equally trained control, and what training-free methods cost in the same bytes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dmc.results.grid import FULL
from dmc.results.store import DONE
from dmc.study.plan import CONTROL, StudyRun

Row = dict[str, Any]
SAME_BYTES = 1.02
"""A method that takes at most so many times the bytes of another takes as many."""


@dataclass(frozen=True)
class Cost:
    """One run or method on one task, over the seeds."""

    name: str
    task: str
    metric: str
    achieved_ratio: float
    """Over all scored positions: tokens over entries, both in sum."""
    bytes_per_token: float
    """Allocated, over the same positions."""
    increases: tuple[float, ...]
    """Metric over that of the control with a full cache, by seed."""
    rival: str | None
    """Training-free method that costs least in these bytes; None: there is none."""
    rival_increases: tuple[float, ...]
    """What it costs, by seed."""

    @property
    def increase(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.increases)

    @property
    def spread(self) -> float | None:
        """Standard deviation over the seeds; None for one."""
        return statistics.stdev(self.increases) if len(self.increases) > 1 else None

    @property
    def share(self) -> float | None:
        """Increase over that of the rival."""
        if self.rival is None or not (rival := statistics.fmean(self.rival_increases)):
            return None
        return self.increase / rival

    def columns(self) -> dict[str, Any]:
        """Plain values."""
        rival = statistics.fmean(self.rival_increases) if self.rival else None
        return {
            "run": self.name, "task": self.task, "metric": self.metric, "seeds": len(self.increases),
            "achieved_ratio": self.achieved_ratio, "bytes_per_token": self.bytes_per_token,
            "increase": self.increase, "spread": self.spread, "rival": self.rival, "rival_increase": rival,
            "share_of_rival": self.share,
        }  # fmt: skip


def study_costs(rows: Sequence[Row], runs: Iterable[StudyRun], metrics: Sequence[str]) -> list[Cost]:
    """Compare every run, and every training-free method at every budget, with the controls of the same seeds.

    Args:
        rows: of `dmc.results.compare`, whose models are the labels of runs.
        runs: all of them; a seed without its control is left out.
        metrics: of the tasks' metrics, those to tell; a task that has one not is left out of it.
    Returns:
        Task by task and metric by metric: the runs, then the training-free methods.
    """
    runs = list(runs)
    costs = []
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task and row["status"] == DONE]
        for metric in metrics:
            table = _Table([row for row in of_task if metric in row["metrics"]], runs, metric)
            costs += [table.cost_of_run(name, task) for name in table.names]
            costs += [table.cost_of_method(policy, budget, task) for policy, budget in table.methods]
    return [cost for cost in costs if cost is not None]


class _Table:
    """Rows of one task, and one of their metrics."""

    def __init__(self, rows: Sequence[Row], runs: Sequence[StudyRun], metric: str) -> None:
        self.rows, self.runs, self.metric = rows, runs, metric
        self.names = list(dict.fromkeys(run.name for run in runs if run.name != CONTROL))
        self.controls = {run.seed: run.label for run in runs if run.name == CONTROL}
        labels = set(self.controls.values())
        free = [row for row in rows if row["model"] in labels and row["policy"] != FULL]
        self.policies = list(dict.fromkeys(row["policy"] for row in free))
        self.methods = list(dict.fromkeys((row["policy"], row["budget"]) for row in free))

    def cost_of_run(self, name: str, task: str) -> Cost | None:
        found = []
        for run in self.runs:
            row = self._row(run.label, FULL)
            if run.name == name and row is not None and self._full(run.seed) is not None:
                found.append((run.seed, row))
        if not found:
            return None
        rivals = {
            policy: [self._at_bytes(seed, policy, _bytes(row)) for seed, row in found] for policy in self.policies
        }
        possible = {policy: costs for policy, costs in rivals.items() if None not in costs}
        rival = min(possible, key=lambda policy: statistics.fmean(possible[policy]), default=None)  # type: ignore[type-var,arg-type]
        return self._cost(name, task, found, rival, possible.get(rival, ()))

    def cost_of_method(self, policy: str, budget: str, task: str) -> Cost | None:
        rows = [(seed, self._row(label, policy, budget)) for seed, label in self.controls.items()]
        found = [(seed, row) for seed, row in rows if row is not None and self._full(seed) is not None]
        return self._cost(f"{policy}, budget {budget}", task, found, None, ()) if found else None

    def _cost(self, name: str, task: str, found: list[tuple[Any, Row]], rival: Any, rival_costs: Any) -> Cost:
        return Cost(
            name,
            task,
            self.metric,
            statistics.harmonic_mean(
                [row["mean_achieved_ratio"] for _, row in found], [row["mean_tokens"] for _, row in found]
            ),
            statistics.fmean(_bytes(row) for _, row in found),
            tuple(self._increase(seed, row) for seed, row in found),
            rival,
            tuple(rival_costs),
        )

    def _at_bytes(self, seed: int | None, policy: str, wanted: float) -> float | None:
        """Interpolate what a policy costs in so many bytes, in their logarithm; None: it takes more at any budget."""
        full = self._full(seed)
        points = [(_bytes(full), 0.0)] if full is not None else []
        points += [
            (_bytes(row), self._increase(seed, row))
            for row in self.rows
            if row["model"] == self.controls.get(seed) and row["policy"] == policy
        ]
        points.sort()
        if not points or points[0][0] > wanted * SAME_BYTES:
            return None
        above = next((index for index, (size, _) in enumerate(points) if size >= wanted), None)
        if above is None or above == 0:
            return points[-1 if above is None else 0][1]
        (low, low_cost), (high, high_cost) = points[above - 1], points[above]
        progress = math.log(wanted / low) / math.log(high / low)
        return low_cost + (high_cost - low_cost) * progress

    def _increase(self, seed: int | None, row: Row) -> float:
        full = self._full(seed)
        assert full is not None
        return row["metrics"][self.metric] - full["metrics"][self.metric]

    def _full(self, seed: int | None) -> Row | None:
        return self._row(self.controls.get(seed), FULL)

    def _row(self, label: str | None, policy: str, budget: str | None = None) -> Row | None:
        found = [
            row
            for row in self.rows
            if row["model"] == label and row["policy"] == policy and (budget is None or row["budget"] == budget)
        ]
        return found[-1] if found else None


def _bytes(row: Row) -> float:
    return row["mean_bytes_allocated_per_token"]


def format_costs(costs: Sequence[Cost]) -> str:
    """Write costs as Markdown tables, one for each task and metric."""
    parts = []
    for task, metric in dict.fromkeys((cost.task, cost.metric) for cost in costs):
        lines = [
            f"{task}, {metric}:",
            "",
            "| run | achieved CR | cache bytes/token | over the control | best training-free in these bytes | share |",
            "|---|---|---|---|---|---|",
        ]
        for cost in costs:
            if (cost.task, cost.metric) == (task, metric):
                lines.append(_line(cost))
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _line(cost: Cost) -> str:
    spread = "" if cost.spread is None else f" ± {cost.spread:.4f}"
    rival = f"{cost.rival} {statistics.fmean(cost.rival_increases):+.4f}" if cost.rival else ""
    share = "" if cost.share is None else f"{cost.share:.2f}"
    return (
        f"| {cost.name} | {cost.achieved_ratio:.2f} | {cost.bytes_per_token:,.0f} | {cost.increase:+.4f}{spread} "
        f"| {rival} | {share} |"
    )
