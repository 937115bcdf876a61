"""Methods in as many bytes as a learned model: measured there, never between two budgets."""

import math
import multiprocessing
from pathlib import Path

import pytest
from report_rows import CONFIGS, run_grid

from dmc.results.equal_bytes import SAME_BYTES, TRIES, at_bytes
from dmc.results.grid import plan_grid
from dmc.results.statistics import beside_baselines
from dmc.results.tables import format_tables

CONTEXT = multiprocessing.get_context("fork")
SIZES = {
    "in proportion": lambda share: 1000 * share,
    "state beside": lambda share: 150 + 850 * share,
    "whole pages": lambda share: 60 * math.ceil(1000 * share / 60),
    "falls slowly": lambda share: 1000 * share**0.3,
    "falls fast": lambda share: 1000 * share**2,
}


@pytest.mark.parametrize("wanted", [900.0, 500.0, 260.0, 190.0])
@pytest.mark.parametrize("name", SIZES)
def test_a_ratio_is_found_at_which_a_method_takes_as_many_bytes(name, wanted):
    tried = []

    def measure(ratio):
        tried.append(ratio)
        return {"mean_bytes_allocated_per_token": SIZES[name](1 / ratio)}

    def check(row):
        size = row["mean_bytes_allocated_per_token"]
        reachable = [1 / SAME_BYTES <= SIZES[name](1 / ratio) / wanted <= SAME_BYTES for ratio in range(1, 30)]
        if name != "whole pages" or any(reachable):
            assert 1 / SAME_BYTES <= size / wanted <= SAME_BYTES and len(tried) <= 4
        else:
            assert wanted <= size < wanted + 60  # no page fewer would do
        assert row["requested_ratio"] in tried and len(tried) <= TRIES
        tried.clear()

    row = at_bytes(measure, wanted, 1000 / wanted)
    check(row)
    first, reached = row["requested_ratio"], row["mean_bytes_allocated_per_token"]
    assert at_bytes(measure, wanted, first, reached) == row and len(tried) == 1  # what some samples hold, all do
    for share in (1.3, 0.6):  # all hold another share than some did
        tried.clear()
        check(at_bytes(measure, wanted, first * share, reached * share))


def test_what_cannot_be_met_ends_with_what_comes_nearest():
    for size in (700.0, 300.0):  # of methods that compress prompts alone, where there is hardly a prompt
        tried = []
        same = {"mean_bytes_allocated_per_token": size}
        assert at_bytes(lambda ratio: tried.append(ratio) or same, 250, 4)["requested_ratio"] >= 4
        assert len(tried) <= 3

    def measure(ratio, most=6):
        if ratio > most:
            raise ValueError("a budget of 1 entry has no room")
        return {"mean_bytes_allocated_per_token": 400 + 600 / ratio}

    for first in (3.3, 7, 30):  # the first of them leaves room, the others none
        assert at_bytes(measure, 300, first)["mean_bytes_allocated_per_token"] < 600
    with pytest.raises(ValueError, match="no room"):
        at_bytes(lambda ratio: measure(ratio, 0.5), 300, 7)


@pytest.fixture
def make_text_grid(make_config, folders, tmp_path):
    """Return a builder of a grid over a stock and a compressed model, and a text."""
    models = {"base": str(folders.stock), "small": str(folders.compressed)}
    text = {"source": {"_target_": "dmc.data.TextSource", "name": str(folders.text)}, "cache_folder": str(tmp_path)}
    text |= {"name": "text", "like": "text_loss", "context_tokens": 192, "scored_tokens": 64, "num_samples": 2}
    return lambda **changes: make_config(**{"models": models, "tasks": [text], **changes})


def test_baselines_stand_in_a_models_bytes_with_what_was_measured_there(make_text_grid):
    baselines = ["tova"]
    budgets, policies = ["bytes:small", "bytes:0.5"], ["full", *baselines, "quest"]
    store = run_grid(make_text_grid(budgets=budgets, policies=policies, engine={"max_batch_size": 1}))
    rows = {(row["policy"], row["budget"]): row for row in store.rows() if not row["learned"]}
    (small,) = (row for row in store.rows() if row["learned"])
    size = rows["full", None]["mean_bytes_allocated_per_token"]
    wanted = {"bytes:small": small["mean_bytes_allocated_per_token"], "bytes:0.5": size / 2}
    assert {row["status"] for row in rows.values()} == {"done"} and ("quest", "bytes:small") not in rows
    for policy in baselines:
        for budget, num_bytes in wanted.items():
            row = rows[policy, budget]
            assert row["mean_bytes_allocated_per_token"] / num_bytes == pytest.approx(1, abs=SAME_BYTES - 1)
            assert row["requested_ratio"] == pytest.approx(row["mean_achieved_ratio"], rel=0.05)
    frame = store.frame()
    beside = beside_baselines(frame, metrics=["loss"]).set_index("baseline")
    assert {*beside.index} == {*baselines}  # all that quest holds is the full cache
    full = rows["full", None]["metrics"]["loss"]
    for policy in baselines:
        lost = rows[policy, "bytes:small"]["metrics"]["loss"] - full
        assert beside.loc[policy, "baseline_lost"] == pytest.approx(lost)
        assert beside.loc[policy, "gap"] == pytest.approx(lost - (small["metrics"]["loss"] - full))
    best = beside[beside["is_best"]].iloc[0]
    tables = "".join(format_tables(frame, metrics=["loss"]))
    assert f"| {abs(best['gap']):.4f}" in tables and f" than {best.name}" in tables
    assert "base, tova | bytes of small" in tables and "base, tova | 0.5 of the bytes" in tables
    assert "↓" not in tables.partition("±")[0] and "≠ " not in tables  # as many bytes is all that was asked for


def test_each_seed_is_given_the_bytes_of_its_own(make_text_grid, folders):
    models = {f"control-{seed}": {"path": str(folders.stock), "variant": "control", "seed": seed} for seed in (0, 1)}
    models |= {f"cr2-{seed}": {"path": str(folders.compressed), "variant": "cr2", "seed": seed} for seed in (0, 1)}
    for budgets in (["bytes"], ["bytes:cr2"]):
        cells = plan_grid(make_text_grid(models=models, policies=["full", "tova"], budgets=budgets), CONFIGS)
        last = [cell for cell in cells if cell.same_bytes_as]
        assert [(cell.method.budget_name, cell.model.name, cell.same_bytes_as.model.name) for cell in last] == [
            ("bytes:cr2", "control-0", "cr2-0"), ("bytes:cr2", "control-1", "cr2-1")
        ]  # fmt: skip
        assert cells[-2:] == last and len({cell.key for cell in cells}) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budgets": ["bytes:smal"]}, "'smal' is no compressed model; did you mean 'small'"),
        ({"budgets": ["bytes:4"]}, "between 0 and 1"),
        ({"budgets": ["bytes:0.5"], "policies": ["tova"]}, "add full to policies"),
    ],
)
def test_bytes_of_nothing_are_told_before_anything_runs(changes, message, make_text_grid):
    with pytest.raises(ValueError, match=message):
        plan_grid(make_text_grid(**{"policies": ["full", "tova"], **changes}), CONFIGS)


def test_processes_wait_for_the_bytes_that_another_one_measures(make_text_grid):
    config = make_text_grid(budgets=["bytes:small"], policies=["full", "tova"])
    processes = [CONTEXT.Process(target=run_grid, args=(config,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    rows = [line for line in (Path(config.output) / "cells.jsonl").read_text().splitlines() if line]
    assert len(rows) == len(plan_grid(config, CONFIGS)) == 3
    assert '"status": "failed"' not in "".join(rows)
