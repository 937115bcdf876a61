"""What a plan proposes fits, needs less communication, and nothing larger fits."""

import dataclasses

import pytest
from composing import ALIKE, composed, on_gpus
from covering import cover
from planned import gpus, plan
from torch.utils._python_dispatch import TorchDispatchMode

from dmc.training.config import PlannerConfig
from dmc.training.planning.fake_step import fake_step
from dmc.training.planning.peak_memory import Memory, plan_memory
from dmc.training.planning.planner import GIB, plan_training, proposal_line, propose_settings
from dmc.training.planning.proposal import HEADROOM, RECOMPUTED, Layout, cost, propose

PLANNED = ("gpt_oss_20b_cr4", "llama2_70b_cr2", "qwen3_0p6b_cr4")
"""One for each strategy; between them with several nodes, a teacher, gates alone, experts, windows and sinks."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANNED)
def test_an_experiment_of_each_strategy_has_the_settings_that_its_plan_proposes(name):
    assumed, config = on_gpus()[name], composed(f"experiment={name}")
    found = plan_training(config, PlannerConfig(**assumed))
    assert found.memory.total <= (1 - HEADROOM) * assumed["device_memory_gib"] * GIB
    assert found.assumed_step_seconds > 0
    better = propose_settings(config, found)
    assert better is None, proposal_line(better, found)


def test_every_strategy_of_an_experiment_is_planned():
    strategies = {name: composed(f"experiment={name}").trainer.strategy for name in on_gpus()}
    assert {strategies[name] for name in PLANNED} == {*strategies.values()}


def test_experiments_on_gpus_that_are_alike_have_the_layout_of_the_one_that_is_planned():
    planned = Layout.of(composed("experiment=llama2_7b_cr2"))
    for name in ALIKE:
        assert Layout.of(composed(f"experiment={name}")) == planned, name


def test_of_all_that_fits_what_sends_and_recomputes_least_is_proposed():
    options = {"training__micro_batch_size": 1, "training__batch_size": 8, "training__sequence_length": 256}
    config = gpus(trainer__strategy="ddp", trainer__devices=2, **options)
    alone = plan(config)
    layouts = [Layout("ddp", None, False, how, size) for how in RECOMPUTED for size in (1, 2, 4)]
    totals = {layout: plan_memory(layout.of_run(config), 2, on_gpu=True).total for layout in layouts}
    for given in layouts[1], layouts[5]:
        limit = totals[given] + 1000
        device = dataclasses.replace(alone.device, memory_gib=limit / (1 - HEADROOM) / GIB)
        fitting = [layout for layout in layouts if totals[layout] <= limit]
        best = min(fitting, key=lambda layout: cost(layout.of_run(config), 2, 3, alone.memory))
        better = propose_settings(config, dataclasses.replace(alone, device=device))
        assert better.settings == best.settings(layouts[0])
        assert better.memory.total == totals[best] and better.passes == 4 // best.micro_batch_size
        proposed = best.of_run(config)
        assert propose_settings(proposed, dataclasses.replace(plan(proposed), device=device)) is None
    assert f"{better.passes} passes a step instead of 4" in proposal_line(better, alone)


def peak(base, slope, knee):
    """Return a peak over the micro-batch that has two slopes, as where another moment becomes the largest."""
    return lambda size: max(base + slope * size, base / 2 + 3 * slope * (size - knee))


@pytest.mark.parametrize(("knee", "start", "gigabytes"), cover([0, 3, 9], [1, 4, 32], [11, 14, 20, 45, 90, 400]))
def test_no_shape_of_the_peak_hides_a_larger_micro_batch_and_few_are_traced(knee, start, gigabytes):
    config = Layout("ddp", None, False, False, start).of_run(gpus(trainer__strategy="ddp", trainer__devices=2))
    needed, traced = peak(10e9, 1e9, knee), []

    def measure(run):
        size, how = run.training.micro_batch_size, run.training.activation_checkpointing
        if how:  # here it saves nothing
            return Memory({"weights": 5_000_000_000, "activations": 10**12}, "", 10, 10)
        traced.append(size)
        return Memory({"weights": 5_000_000_000, "activations": round(needed(size) - 5e9)}, "", 10, 10)

    device = gigabytes * 1e9
    better = propose(config, 2, device, measure(config), measure)
    fitting = [size for size in (1, 2, 4, 8, 16, 32) if needed(size) <= device * (1 - HEADROOM)]
    if needed(start) <= device:
        fitting.append(start)
    chosen = max(fitting, default=None)
    assert (better.settings if better else []) == (
        [] if chosen in (None, start) else [f"training.micro_batch_size={chosen}"]
    )
    assert len(traced) == len(set(traced)) <= 5


def test_weights_are_divided_inside_a_node_where_they_fit_and_gradients_travel_once():
    config = gpus(trainer__strategy="fsdp2", trainer__devices=8, trainer__num_nodes=2, training__micro_batch_size=1)
    better = propose_settings(config, plan(config))
    assert better.settings == ["trainer.strategy=hsdp", "training.micro_batch_size=4"]  # the whole share: one pass
    assert better.passes == 1


@pytest.mark.parametrize(
    ("gigabytes", "settings"),
    [
        (80, ["training.activation_checkpointing=false"]),
        (62, ["training.activation_checkpointing=false", "training.micro_batch_size=16"]),
        (40, ["training.activation_checkpointing=selective", "training.micro_batch_size=16"]),
        (16, ["training.micro_batch_size=8"]),
    ],
)
def test_what_fits_with_less_recomputed_is_proposed_before_a_larger_micro_batch(gigabytes, settings):
    options = {"training__activation_checkpointing": True, "training__sequence_length": 4096}
    config = gpus(training__micro_batch_size=32, training__batch_size=32, **options)
    a_sequence = {False: 2e9, "selective": 1.5e9, True: 1e9}
    least = {False: 50e9, "selective": 20e9, True: 2e9}

    def measure(run):
        how = run.training.activation_checkpointing
        activations = max(least[how], a_sequence[how] * run.training.micro_batch_size)
        return Memory({"weights": 1_000_000_000, "activations": round(activations)}, "", 10**9, 10**9)

    better = propose(config, 1, gigabytes * 1e9, measure(config), measure)
    assert (better.settings if better else []) == settings


def test_a_cpu_has_no_wires():
    config = gpus(trainer__accelerator="cpu", training__micro_batch_size=1)
    assert propose_settings(config, plan(config)) is None


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.count += 1
        return function(*arguments, **(keywords or {}))


def operations(length=4096, **changes):
    config = gpus(
        compression={"action": "drop", "target_ratio": 2.0, **changes.pop("compression", {})},
        training__sequence_length=length, training__activation_checkpointing=True, **changes,
    )  # fmt: skip
    with fake_step(config, range(2), 0, counted := Operations()) as step:
        step.micro_batch()
    return counted.count


@pytest.mark.parametrize("teacher", [None, pytest.param({"path": "teacher"}, marks=pytest.mark.slow)])
def test_what_a_plan_traces_grows_with_neither_delay_nor_length_nor_vocabulary(teacher):
    wide = {**gpus().base.shape, "vocab_size": 151_936}
    counts = {
        operations(length, compression={"delay": delay}, training__distillation=teacher, base__shape=wide)
        for delay, length in ((16, 4096), (512, 4096), (512, 8192))
    }
    assert len(counts) == 1 and counts.pop() < (3400 if teacher is None else 4000)
