"""One ramp for several ratios: what branches off at a milestone is what a run to that ratio comes to."""

import copy

import pytest
import torch
from launching import logged_losses

from dmc.config import build_config
from dmc.models import load_model
from dmc.training.config import PlannerConfig, RunConfig
from dmc.training.planning.planner import plan_training
from dmc.training.run import train

STAGES = {
    "zero_out": {"length": "2 steps"},
    "retrofit": {"length": "6 steps", "ramp_to": 4.0},
    "solidify": {"length": "2 steps"},
}
VARIANTS = {
    "delays": {"delays": [5, 3, 2], "ratio_control": {"gain": 0.5, "max_weight": 50.0}},
    "tokens and rate": {
        "stages": {
            "zero_out": {"length": "2 steps"},
            "retrofit": {"length": "256 tokens_per_ratio"},  # two steps
            "solidify": {"length": "2 steps", "learning_rate": 1e-4},
        }
    },
}


@pytest.fixture
def build(run_values, tmp_path):
    """Build the configuration of a run to a ratio, with settings of its training."""

    def run(name, ratio, *, seed=0, **training):
        values = copy.deepcopy(run_values) | {"output_dir": str(tmp_path / name), "seed": seed}
        values["compression"]["target_ratio"] = ratio
        quick = {"checkpoint_every_steps": 100, "validate_every_steps": 100, "calibrate": False}
        values["training"] |= {"stages": STAGES} | quick | training
        return build_config(RunConfig, values)

    return run


@pytest.mark.parametrize(
    ("variant", "milestones"),
    [
        ("delays", {3.0: 6}),
        pytest.param("delays", {2.0: 4, 3.0: 6}, marks=pytest.mark.slow),
        pytest.param("tokens and rate", {2.0: 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_branch_gives_the_model_of_a_run_to_its_ratio_bit_by_bit(build, tmp_path, variant, milestones):
    settings = VARIANTS[variant]
    train(build("ramp", 4.0, milestones={"ratios": [2.0, 3.0]}, **settings))
    for ratio, steps in milestones.items():
        milestone = tmp_path / "ramp" / "milestones" / f"cr{ratio:g}"
        config = build(f"branch{ratio:g}", ratio, branch_from=str(milestone), **settings)
        branch, unbranched = train(config), train(build(f"whole{ratio:g}", ratio, **settings))
        expected = logged_losses(unbranched.folder)
        assert sorted(expected) == list(range(steps + 2))
        assert logged_losses(branch.folder) == {step: expected[step] for step in (steps, steps + 1)}
        state = load_model(branch.final).state_dict()
        assert all(torch.equal(value, state[name]) for name, value in load_model(unbranched.final).state_dict().items())
        assert load_model(branch.final).compression == load_model(unbranched.final).compression
        stages = plan_training(config, PlannerConfig()).stages
        assert [(stage.name, stage.steps) for stage in stages] == [("solidify", 2)]


REFUSED = [
    (2.0, {"seed": 1}, r"its run has other settings \(seed: 0 then, 1 now\)"),
    (2.0, {"ratio_weight": 3.0}, r"training.ratio_weight: 2.0 then, 3.0 now"),
    (
        2.0,
        {"stages": {**STAGES, "retrofit": {"length": "6 steps"}}},
        "step 3 of its run was another.*retrofit.ramp_to=4 in",
    ),
    (1.5, {}, "step 3 of its run was another"),
    (2.0, {"stages": {**STAGES, "solidify": None}}, "lies after step 4, this run ends after 4"),
]


def test_a_branch_needs_a_milestone_that_it_could_have_come_to_until_it_has_its_own_checkpoint(build, tmp_path):
    milestone = tmp_path / "ramp" / "milestones" / "cr2"
    config = build("branch", 2.0, branch_from=str(milestone))
    with pytest.raises(FileNotFoundError, match="milestones/cr2 does not exist"):
        train(config)
    train(build("ramp", 4.0, milestones={"ratios": [2.0]}))
    for ratio, settings, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            train(build("branch", ratio, branch_from=str(milestone), **settings))
        assert not (tmp_path / "branch" / "run.json").exists()
    run = train(config)
    state = load_model(run.final).state_dict()
    for path in (run.final, milestone.parent):  # the ramp may be cleared away by then
        path.rename(path.with_name("away"))
    assert all(torch.equal(value, state[name]) for name, value in load_model(train(config).final).state_dict().items())
