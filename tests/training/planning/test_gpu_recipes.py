"""Every recipe for GPUs is planned through, on tensors without data, and fits the GPU that it names."""

import pytest
from composing import composed, on_gpus

from dmc.training.config import PlannerConfig
from dmc.training.planning.planner import GIB, plan_table, plan_training

QUICK = "qwen3_0p6b_cr4"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in on_gpus()]
)
def test_the_plan_of_a_recipe_runs_through_and_fits_the_gpu_that_it_names(name):
    assumed, config = on_gpus()[name], composed(f"experiment={name}")
    plan = plan_training(config, PlannerConfig(**assumed))
    assert 0 < plan.memory.total <= assumed["device_memory_gib"] * GIB
    assert plan.assumed_step_seconds > 0 and plan.steps > 0
    assert assumed["device"] in plan_table(plan)
    plan.refuse_what_does_not_fit(config)
