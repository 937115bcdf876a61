"""The quickstart's results: a control, its retrofit, and the retrofit's snapshots along the ramp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dmc.results.report.findings import Findings, Heatmap, Result
from dmc.results.report.names import FULL_CACHE
from dmc.results.report.place_rows import ratio_heatmap

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
    held = results["final"]["achieved_ratio"]  # what the training-free methods were given too
    rows = {YARDSTICK: (1.0, results[YARDSTICK]), "base": (1.0, results["base"])}
    rows |= {f"snapshot {ratio}": (float(ratio), row) for ratio, row in results["snapshots"].items()}
    rows["retrofit"] = (held, results["final"])
    free = results.get("training_free", {})
    rows |= {name: (held, row) for name, row in free.items()}
    source = findings.add_source(str(folder), results)
    for name, (requested, row) in rows.items():
        is_full, model = name in (YARDSTICK, "base"), YARDSTICK if name in free else name
        findings.results.append(
            Result(
                name=name,
                method=name,
                model=model,
                budget=FULL_CACHE if is_full else f"CR {requested:.3g}",
                own_gates=not is_full and name not in free,
                is_full=is_full,
                task=TASK,
                metric="loss",
                higher_is_better=False,
                quality=row["loss"],
                quality_error=None,
                over_full_cache=None if name == YARDSTICK else row["loss"] - results[YARDSTICK]["loss"],
                over_full_cache_error=row.get("over_control_error"),
                requested_ratio=requested,
                achieved_ratio=row["achieved_ratio"],
                bytes_per_token=row["bytes_per_token"],
                bytes_allocated=None,
                prefill_tokens_per_second=None,
                decode_tokens_per_second=None,
                samples=results.get("sequences"),
                source=source,
            )
        )
    if (folder / RATIOS).is_file():
        findings.head_ratios += _last_validation(folder / RATIOS)


def _last_validation(path: Path) -> list[Heatmap]:
    row = json.loads(path.read_text().splitlines()[-1])
    ratios: list[list[float | None]] = [[1 / held for held in layer] for layer in row["held"]]
    return [ratio_heatmap("retrofit", "retrofit", f"retrofit, step {row['step']}", TASK, ratios)]
