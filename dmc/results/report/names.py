"""How the page calls methods and budgets: short, for labels beside points."""

from __future__ import annotations

from collections.abc import Sequence

from dmc.results.compare_report import requested
from dmc.results.store import Row

FULL_CACHE = "full cache"


def short_names(folders: Sequence[Sequence[Row]]) -> dict[str, str]:
    """Name methods without their model where the rows of all folders are of one stock model."""
    stock = [[row for row in rows if not row["own_gates"]] for rows in folders]
    several = any(len({row["model"] for row in rows}) > 1 for rows in stock)
    several |= len({row["model_key"] for rows in stock for row in rows}) > 1
    return {row["method"]: _short_name(row, several) for rows in folders for row in rows}


def _short_name(row: Row, several_models: bool) -> str:
    if row["own_gates"] and row["budget"] is None:
        return f"{row['model']} (own gates)"
    name = FULL_CACHE if row["budget"] is None else row["policy"]
    return f"{row['model']} {name}" if several_models or row["own_gates"] else name


def budget_of(row: Row) -> str:
    """Write what was asked for."""
    return FULL_CACHE if row["budget"] is None and not row["own_gates"] else requested(row)


def title_of(row: Row, names: dict[str, str]) -> str:
    """Write method and budget."""
    budget, name = budget_of(row), names[row["method"]]
    return name if budget == FULL_CACHE else f"{name} at {budget}"
