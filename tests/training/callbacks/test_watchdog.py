import functools
import os
import signal
import time
from pathlib import Path

from launching import Ranks, crowd_steps, hang_at, hold_interpreter_at

from dmc.training.callbacks.watchdog import DUMP_SIGNAL
from dmc.training.module import RetrofitModule
from dmc.training.run import train


def stacks_of_a_hang(run_values, log, sabotage, said):
    run_values["training"]["hang_timeout_minutes"] = 1 / 60
    stacks = Path(run_values["output_dir"]) / "stacks" / "rank0.txt"
    with Ranks(run_values, 1, log, functools.partial(sabotage, step=3)) as ranks:
        deadline = time.monotonic() + 60
        while not (stacks.exists() and "training_step" in stacks.read_text() and said in log.read_text()):
            assert ranks.alive and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.05)
    return stacks


def test_run_that_hangs_writes_its_stacks_and_says_where(run_values, tmp_path):
    said = "nothing has moved for 1 s in step 3: stacks of all threads are in "
    stacks = stacks_of_a_hang(run_values, tmp_path / "log", hang_at, said)
    assert 'launching.py", line' in stacks.read_text()
    assert f"{said}{stacks}" in (tmp_path / "log").read_text()


def test_run_that_hangs_where_no_python_runs_writes_its_stacks(run_values, tmp_path):
    stacks = stacks_of_a_hang(run_values, tmp_path / "log", hold_interpreter_at, "")
    assert 'launching.py", line' in stacks.read_text()


def test_run_that_is_only_slow_survives_its_dumps(run_values, tmp_path):
    run_values["training"]["hang_timeout_minutes"] = 0.01 / 60
    with Ranks(run_values, 1, tmp_path / "log", functools.partial(crowd_steps, seconds=0.1)) as ranks:
        assert ranks.join() == [0], (tmp_path / "log").read_text()[-4000:]
    stacks = (Path(run_values["output_dir"]) / "stacks" / "rank0.txt").read_text()
    assert stacks.count("training_step") > 5


def test_signal_writes_the_stacks_of_a_run_that_goes_on(run_config, monkeypatch):
    plain = RetrofitModule.loss_at

    def loss_at(self, step, batch):
        if step == 3 and not self.micro_batch_metrics:
            os.kill(os.getpid(), DUMP_SIGNAL)
        return plain(self, step, batch)

    monkeypatch.setattr(RetrofitModule, "loss_at", loss_at)
    before = signal.getsignal(DUMP_SIGNAL)
    run = train(run_config)
    assert (run.folder / "stacks" / "rank0.txt").read_text().count("most recent call first") >= 1
    assert "loss_at" in (run.folder / "stacks" / "rank0.txt").read_text()
    assert signal.getsignal(DUMP_SIGNAL) == before
