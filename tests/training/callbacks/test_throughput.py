from types import SimpleNamespace

import pytest
from launching import logged

from dmc.config import build_config
from dmc.data import Shuffled
from dmc.models import load_model
from dmc.training import optimizer_step
from dmc.training.callbacks import throughput
from dmc.training.callbacks.validation import Validation
from dmc.training.config import RunConfig
from dmc.training.flops import flops_per_token
from dmc.training.module import RetrofitModule
from dmc.training.run import train


@pytest.fixture
def clock(monkeypatch):
    """Let time pass only where a part of a run is told to take some."""
    now = [0.0]
    for timed in (throughput, optimizer_step):
        monkeypatch.setattr(timed, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def takes(owner, name, seconds):
        plain = getattr(owner, name)

        def slow(*arguments, **options):
            now[0] += seconds
            return plain(*arguments, **options)

        monkeypatch.setattr(owner, name, slow)

    return takes


def test_speed_counts_steps_and_waits_for_data_and_nothing_else(run_values, clock):
    clock(RetrofitModule, "training_step", 3.0)  # twice per step
    clock(Shuffled, "__getitem__", 0.5)  # four times per step
    clock(Validation, "log_score", 1000.0)
    run_values["training"] |= {"log_every_steps": 2, "activation_checkpointing": True}
    run_values["trainer"]["peak_teraflops"] = 1e-6
    run_values["training"] |= {"calibrate": False}
    run = train(build_config(RunConfig, run_values))
    rows = [logged(run.folder, f"train/{name}") for name in ("seconds_per_step", "data_seconds_per_step")]
    assert rows == [dict.fromkeys((1, 3, 5, 7), 8.0), dict.fromkeys((1, 3, 5, 7), 2.0)]
    speeds = logged(run.folder, "train/tokens_per_second")
    assert set(speeds.values()) == {4 * 32 / 8.0}
    needed = flops_per_token(load_model(run.final).config, 32) * 4 * 32 / 8.0
    assert logged(run.folder, "train/mfu")[7] == pytest.approx(needed / 1e6)
    assert all(0.05 < value < 100 for value in logged(run.folder, "train/peak_memory_gib").values())


def test_processor_of_unknown_peak_has_no_utilization(run_values):
    run_values["training"] |= {"stages": {"retrofit": {"length": "2 steps"}}, "calibrate": False}
    folder = train(build_config(RunConfig, run_values)).folder
    assert list(logged(folder, "train/tokens_per_second")) == [1] and not logged(folder, "train/mfu")
