"""The quickstart's results: a control, its retrofit, and the retrofit's snapshots along the ramp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dmc.evaluation.report.findings import Findings, Heatmap, Result
from dmc.evaluation.report.place_rows import ratio_heatmap

YARDSTICK = "control"
TASK = "held-out text"
RATIOS = Path("retrofit/heatmaps/ratios.jsonl")


def add_quickstart(results: dict[str, Any], folder: Path, findings: Findings) -> None:
    """Add the models of a quickstart, and the CR of every head of its retrofit.

    Args:
        results: what `results.json` holds.
        folder: where it lies.
        findings: to add to.
    """
    rows = {"base": results["base"], YARDSTICK: results[YARDSTICK]}
    rows |= {f"snapshot at CR {ratio}": row for ratio, row in results["snapshots"].items()}
    rows["retrofit"] = results["final"]
    source = findings.add_source(str(folder), results)
    for name, row in rows.items():
        own_gates = name not in ("base", YARDSTICK)
        findings.results.append(
            Result(
                name=name,
                method=name,
                model=name,
                budget=f"CR {row['achieved_ratio']:.1f}" if own_gates else "full cache",
                own_gates=own_gates,
                is_full=name == YARDSTICK,
                task=TASK,
                metric="loss",
                higher_is_better=False,
                quality=row["loss"],
                quality_error=None,
                over_full_cache=row["loss"] - results[YARDSTICK]["loss"] if name != YARDSTICK else None,
                over_full_cache_error=None,
                requested_ratio=row["achieved_ratio"],
                achieved_ratio=row["achieved_ratio"],
                bytes_per_token=row["bytes_per_token"],
                bytes_allocated=None,
                prefill_tokens_per_second=None,
                decode_tokens_per_second=None,
                samples=None,
                source=source,
            )
        )
    if (folder / RATIOS).is_file():
        findings.head_ratios += _last_validation(folder / RATIOS)


def _last_validation(path: Path) -> list[Heatmap]:
    row = json.loads(path.read_text().splitlines()[-1])
    ratios: list[list[float | None]] = [[1 / held for held in layer] for layer in row["held"]]
    return [ratio_heatmap(f"retrofit, step {row['step']}", ratios)]
