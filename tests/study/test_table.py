"""What compression costs: over the control of the same seed, and beside the best method in the same bytes."""

import math
from pathlib import Path

import pytest

from dmc.study.evaluation import write_results
from dmc.study.plan import StudyConfig, StudyRun, plan_bases, plan_runs
from dmc.study.table import format_costs, study_costs


def row(model, policy, budget, size, loss, far=None):
    metrics = {"loss": loss} | ({} if far is None else {"far_repeat_loss": far})
    return {
        "model": model, "policy": policy, "budget": budget, "task": "reading", "status": "done", "metrics": metrics,
        "mean_bytes_allocated_per_token": size, "mean_achieved_ratio": 1000 / size, "mean_tokens": 512.0,
        "bytes_allocated_per_token": 7, "achieved_ratio": 7,  # at the last position: nothing is compared there
    }  # fmt: skip


def runs_of(names, seeds=(0, 1)):
    return [StudyRun(name, seed, Path(f"{name}-s{seed}"), ()) for seed in seeds for name in names]


ROWS = [
    row("control-s0", "full", None, 1000, 2.0), row("control-s1", "full", None, 1000, 2.1),
    row("control-s0", "h2o", "4", 250, 2.3), row("control-s1", "h2o", "4", 250, 2.5),
    row("control-s0", "h2o", "2", 500, 2.1), row("control-s1", "h2o", "2", 500, 2.3),
    row("control-s0", "snapkv", "4", 900, 2.0), row("control-s1", "snapkv", "4", 900, 2.1),
    row("merge-s0", "full", None, 250, 2.05), row("merge-s1", "full", None, 250, 2.15),
]  # fmt: skip


def test_a_run_costs_what_it_adds_to_the_control_of_its_seed():
    cost = study_costs(ROWS, runs_of(["control", "merge"]), ["loss"])[0]
    assert (cost.name, cost.task, cost.metric) == ("merge", "reading", "loss")
    assert cost.increases == pytest.approx((0.05, 0.05))
    assert cost.rival == "h2o"  # snapkv has no budget so small
    assert cost.rival_increases == pytest.approx((0.3, 0.4))
    assert cost.share == pytest.approx(0.05 / 0.35)
    assert cost.achieved_ratio == 4
    assert cost.spread == pytest.approx(0)


def test_rivals_between_two_budgets_are_interpolated_in_the_logarithm_of_bytes():
    size = 250 * 2**0.25
    rows = [each for each in ROWS if each["model"] != "merge-s0"] + [row("merge-s0", "full", None, size, 2.05)]
    cost = study_costs(rows, runs_of(["control", "merge"], [0]), ["loss"])[0]
    assert cost.rival_increases == pytest.approx((0.3 + (0.1 - 0.3) * 0.25,))
    assert math.isclose(cost.bytes_per_token, size)


def test_a_method_that_needs_more_bytes_at_any_budget_is_no_rival():
    rows = [*ROWS[:6], row("merge-s0", "full", None, 100, 2.05)]
    cost = study_costs(rows, runs_of(["control", "merge"], [0]), ["loss"])[0]
    assert (cost.rival, cost.share) == (None, None)


def test_methods_stand_in_the_table_with_every_budget_and_seeds_without_a_control_do_not():
    rows = [each for each in ROWS if each["model"] != "control-s1"]
    costs = {cost.name: cost for cost in study_costs(rows, runs_of(["control", "merge"]), ["loss"])}
    assert list(costs) == ["merge", "h2o, budget 4", "h2o, budget 2", "snapkv, budget 4"]
    assert costs["h2o, budget 2"].increases == pytest.approx((0.1,))
    table = format_costs(list(costs.values()))
    assert "| merge | 4.00 | 250 | +0.0500 | h2o +0.3000 | 0.17 |" in table
    assert "± " in format_costs(study_costs(ROWS, runs_of(["control", "merge"]), ["loss"]))


def test_a_metric_that_a_task_has_not_is_left_out():
    rows = [*ROWS, row("control-s0", "full", None, 1000, 2.0, far=1.0) | {"task": "answering"}]
    costs = study_costs(rows, runs_of(["control", "merge"]), ["loss", "far_repeat_loss"])
    assert {(cost.task, cost.metric) for cost in costs} == {("reading", "loss")}


def test_a_row_without_finite_figures_is_left_out_and_told(tmp_path):
    wrong = row("merge-s1", "full", None, 250, math.nan) | {
        "status": "not finite", "not_finite": ["loss"], "method": "merge-s1, own gates", "own_gates": True, "key": "k",
        "model_key": "m", "task_key": "t",
    }  # fmt: skip
    rows = [*ROWS[:-1], wrong]
    (cost,) = (cost for cost in study_costs(rows, runs_of(["control", "merge"]), ["loss"]) if cost.name == "merge")
    assert cost.increases == pytest.approx((0.05,))
    config = StudyConfig(**SETTINGS | {"output": str(tmp_path)})
    table = write_results(config, rows, runs_of(["control", "merge"]))
    assert table.endswith("left out of the figures: merge-s1, own gates, reading: loss is nan")
    assert (tmp_path / "study.md").read_text() == table + "\n"


SETTINGS = {"bases": {"base": ["a=1"]}, "runs": {"control": ["b=1"], "merge": ["b=2"]}, "policies": ["full"],
            "budgets": [4], "tasks": ["text_loss"], "seeds": [3, 5], "output": "out"}  # fmt: skip


def test_runs_are_planned_seed_by_seed_each_with_its_command():
    config = StudyConfig(**SETTINGS)
    assert [run.arguments for run in plan_bases(config)] == [("a=1", "output_dir=out/base")]
    assert [run.label for run in plan_runs(config)] == ["control-s3", "merge-s3", "control-s5", "merge-s5"]
    assert plan_runs(config)[3].arguments == ("b=2", "output_dir=out/merge-s5", "seed=5")
    further = StudyConfig(**SETTINGS | {"arguments": ["c=3"]})
    assert plan_bases(further)[0].arguments == ("a=1", "c=3", "output_dir=out/base")
    assert plan_runs(further)[0].arguments[-3:] == ("c=3", "output_dir=out/control-s3", "seed=3")
    alone = StudyConfig(**SETTINGS | {"only": ["merge"], "seeds": [3]})
    assert [run.label for run in plan_runs(alone)] == ["control-s3", "merge-s3"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runs": {"merge": []}}, r"has no 'control'"),
        ({"only": ["merg"]}, r"only=\['merg'\]: expected some of control, merge"),
        ({"processes": 0}, "processes=0"),
        ({"seeds": []}, r"seeds=\[\]"),
    ],
)
def test_studies_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        StudyConfig(**SETTINGS | change)
