"""Lines of a table: over seeds, beside the full cache and beside rivals in as many bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pandas
import pytest

from dmc.results.measurement import to_frame
from dmc.results.statistics import asked_of, beside_rivals, pareto_front, rank_at_bytes, summarize
from dmc.results.store import Store
from dmc.results.tables import format_tables

NOISE = numpy.random.default_rng(0).normal(0, 0.002, 16)


def row(model: str, policy: str, budget: str | None, size: float, lost: float, **changes: Any) -> dict[str, Any]:
    """A finished cell whose 16 samples, two of each file, lose `lost` over the full cache's."""
    values = [2.0 + index / 8 + lost + (NOISE[index] if lost else 0.0) for index in range(16)]
    own = model.startswith("merge")
    row = {
        "key": f"{model} {policy} {budget}", "status": "done", "method": f"{model}, {policy}", "model": model,
        "own_gates": own, "policy": policy, "budget": budget, "task": "text", "model_key": model, "policy_key": policy,
        "task_key": "t", "samples_key": "s", "main_metric": "loss", "higher_is_better": False,
        "metrics": {"loss": sum(values) / 16, "far_loss": 3.0}, "samples_by_metric": {"loss": values},
        "samples": 16, "contexts": [index // 2 for index in range(16)], "achieved_ratio": 1100 / size,
        "requested_ratio": 1000 / size if own else float(budget or 1), "bytes_allocated_per_token": size,
        "mean_achieved_ratio": 1000 / size, "mean_bytes_allocated_per_token": size, "mean_tokens": 512.0,
        "settings": {"model": {"variant": model[:-3], "seed": int(model[-1])} if "-s" in model else {}},
        "reference": "control", "provenance": {},
    }  # fmt: skip
    return row | changes


def study(seeds: int = 3) -> pandas.DataFrame:
    rows = []
    for seed in range(seeds):
        shift = 0.001 * seed
        rows += [
            row(f"control-s{seed}", "full", None, 1000, 0.0),
            row(f"control-s{seed}", "h2o", "2", 500, 0.1 + shift), row(f"control-s{seed}", "h2o", "4", 250, 0.3),
            row(f"control-s{seed}", "snapkv", "4", 900, 0.05),
            row(f"merge-s{seed}", "full", None, 250, 0.05 + shift),
        ]  # fmt: skip
    return to_frame(rows)


def test_seeds_of_a_method_are_one_line_beside_the_full_caches_of_their_own_seeds() -> None:
    summary = summarize(study()).set_index("title")
    assert list(summary.index) == [
        "control, full", "control, h2o, CR 2", "control, h2o, CR 4", "control, snapkv, CR 4", "merge, own gates, CR 4",
    ]  # fmt: skip
    merge, full = summary.loc["merge, own gates, CR 4"], summary.loc["control, full"]
    assert merge["lost"] == pytest.approx(0.051 + NOISE.mean())
    assert (merge["seeds"], merge["seeds_worse"], merge["standing"]) == (3, 3, "worse")
    assert (merge["contexts"], merge["samples"], merge["share"]) == (8, 16, 0.25)
    assert merge["lost_lower"] < merge["lost"] < merge["lost_upper"] and merge["margin"] == 0.02
    assert (full["standing"], bool(full["is_full"]), full["asked"]) == ("", True, "full cache")
    assert full["lost"] is None or full["lost"] != full["lost"]
    assert len(merge["keys"]) == 3
    assert pareto_front(summary.reset_index()) == [4, 3, 0]


def test_rivals_are_compared_in_as_many_bytes_sample_by_sample() -> None:
    beside = beside_rivals(study()).set_index("rival")
    assert list(beside.index) == ["h2o"]  # snapkv has no budget so small
    h2o = beside.loc["h2o"]
    assert bool(h2o["is_best"]) and (h2o["seeds"], h2o["seeds_ahead"], h2o["standing"]) == (3, 3, "as good")
    assert h2o["rival_lost"] == pytest.approx(0.3 + NOISE.mean())
    assert h2o["gap"] == pytest.approx(0.25 - 0.001) and h2o["gap_error"] < 0.002


def test_the_table_puts_a_compressed_model_beside_its_best_rival_and_counts_seeds() -> None:
    table, legend = format_tables(study())
    (merge,) = [line for line in table.splitlines() if line.startswith("| merge, own gates |")]
    assert "worse, 3 of 3 seeds worse" in merge and "| h2o +0.2995" in merge and "3 of 3 seeds behind" in merge
    assert "nan" not in table and legend.startswith("±")
    asked = study(1).assign(question="hidden", split=None)
    mixed = pandas.concat([study(1), asked.assign(task="other")])
    assert "nan" not in "".join(format_tables(mixed)) and "question hidden" in "".join(format_tables(mixed))


def test_methods_are_ranked_by_bytes_not_by_entries() -> None:
    ranked = rank_at_bytes(study(1), 0.5)
    assert list(ranked["policy"]) == ["h2o"]  # at CR 4 of its entries snapkv still takes nine tenths of the bytes
    assert (ranked["lost"][0], bool(ranked["tied"][0])) == (pytest.approx(0.1 + NOISE.mean()), True)
    assert list(rank_at_bytes(study(1), 0.95)["policy"]) == ["h2o", "snapkv"]


def test_ratios_of_seeds_are_all_tokens_over_all_entries() -> None:
    ratios = {"control-s0": 2.0, "control-s1": 8.0}
    rows = [row(name, "full", None, 1000, 0.0, mean_achieved_ratio=ratio) for name, ratio in ratios.items()]
    (line,) = summarize(to_frame(rows)).to_dict("records")
    assert line["achieved_ratio"] == pytest.approx(2 / (1 / 2 + 1 / 8))


def test_methods_of_one_sample_are_not_told_apart() -> None:
    rows = [row("one", "full", None, 1000, 0.0), row("one", "h2o", "2", 500, 0.1), row("one", "tova", "2", 500, 0.9)]
    single = [
        each | {"samples": 1, "contexts": [0], "samples_by_metric": {"loss": each["samples_by_metric"]["loss"][:1]}}
        for each in rows
    ]
    ranked = rank_at_bytes(to_frame(single), 0.5)
    assert list(ranked["policy"]) == ["h2o", "tova"] and list(ranked["tied"]) == [True, True]


def test_another_stock_models_full_cache_is_no_yardstick() -> None:
    rows = [row("one", "full", None, 1000, 0.0), row("two", "h2o", "4", 250, 0.3)]
    frame = to_frame(rows)
    assert list(summarize(frame)["standing"]) == ["", ""]
    assert rank_at_bytes(frame, 0.5).empty


@pytest.mark.parametrize("change", [{"task_key": "other"}, {"samples_key": "other"}])
def test_nothing_is_compared_across_settings_or_samples(change: dict[str, Any]) -> None:
    rows = [row("one", "full", None, 1000, 0.0), row("one", "h2o", "4", 250, 0.3) | change]
    frame = to_frame(rows)
    assert set(summarize(frame)["standing"]) == {""}


def test_the_tasks_of_a_benchmark_are_one_mean_with_its_error() -> None:
    rows = [
        row("one", policy, budget, size, lost, task=task, benchmark="both", key=f"{policy}{task}")
        for policy, budget, size, lost in (("full", None, 1000, 0.0), ("h2o", "4", 250, 0.3))
        for task in ("a", "b")
    ]
    summary = summarize(to_frame(rows))
    assert list(summary["task"]) == ["both", "both"] and list(summary["samples"]) == [32, 32]
    alone = summarize(to_frame(rows[::2]))
    assert summary["lost"][1] == pytest.approx(alone["lost"][1])
    assert summary["lost_error"][1] == pytest.approx(alone["lost_error"][1] / 2**0.5)


def test_a_frame_has_a_line_for_each_metric_and_place(tmp_path: Path) -> None:
    table = {"length": [8, 16], "depth": [0, 1], "samples": [[2, 2], [2, 0]], "loss": [[1.0, 2.0], [3.0, None]]}
    store = Store(tmp_path / "cells.jsonl")
    assert store.frame().empty
    store.append(row("one", "h2o", "4", 250, 0.3, by_length_and_depth=table, decode_tokens_per_second=9.0))
    store.append(row("one", "tova", "4", 250, 0.3, status="failed"))
    frame = store.frame()
    assert [f"{each.metric} {each.by}".strip() for each in frame.itertuples()] == [
        "loss", "far_loss", "decode_tokens_per_second", *["loss length depth"] * 3,
    ]  # fmt: skip
    places = frame[frame["by"] == "length depth"]
    assert places[["length", "depth", "value"]].values.tolist() == [[8, 0, 1], [8, 1, 2], [16, 0, 3]]
    assert set(frame["policy"]) == {"h2o"} and set(frame["folder"]) == {str(tmp_path)}
    assert frame["bytes_per_token"][0] == 250 and frame["end_ratio"][0] == 4.4
    assert asked_of(frame.iloc[0]) == "CR 4"
