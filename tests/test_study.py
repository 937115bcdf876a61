"""What a study trains, and what it refuses; its table is that of every comparison."""

import pytest

from dmc.study import StudyConfig, plan_bases, plan_runs

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
