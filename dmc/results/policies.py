"""Build policies and budgets from settings: `configs/policy/h2o.yaml` and `4` or `tokens:128`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dmc.budget import Budget
from dmc.config.instantiate import instantiate


def policy_from_config(settings: Mapping[str, Any] | None, budget: Budget | float | str | None) -> Any | None:
    """Build a policy.

    Args:
        settings: `_target_` and options, `{"_target_": "dmc.policies.H2O", "recent": 32}`; None or empty: the full
            cache, or the one that a model's learned gates keep.
        budget: see `parse_budget`; None for the full cache only.
    Returns:
        The policy, or None for the full cache.
    Raises:
        ValueError: the target or an option is unknown, a value is refused, or a budget is missing or superfluous.
    """
    if not settings:
        if budget is not None:
            raise ValueError(f"budget={budget} needs a policy that keeps to it: the full cache has no budget")
        return None
    if budget is None:
        raise ValueError(f"{settings.get('_target_')} needs a budget: a compression ratio such as 4, or tokens:128")
    return instantiate(settings, "policy", budget=parse_budget(budget))


def parse_budget(budget: Budget | float | str) -> Budget:
    """Read a compression ratio (4, "4", "2.5") or a number of entries per KV head ("tokens:128").

    Raises:
        ValueError: it is neither, or out of range.
    """
    if isinstance(budget, Budget):
        return budget
    kind, _, number = str(budget).rpartition(":")
    try:
        if kind == "tokens":
            return Budget(tokens=int(number))
        if kind == "" and not isinstance(budget, bool):
            return Budget(ratio=float(number))
    except ValueError as error:
        raise ValueError(f"budget={budget!r}: {error}") from error
    raise ValueError(f"budget={budget!r}: expected a compression ratio such as 4, or tokens:128")


def budget_name(budget: Budget) -> str:
    """Write a budget as `parse_budget` reads it: "4" or "tokens:128"."""
    return f"tokens:{budget.tokens}" if budget.ratio is None else f"{budget.ratio:.12g}"
