import functools
import os
import signal
import time
from pathlib import Path

from launching import Ranks, hang_at

from dmc.training import train
from dmc.training.callbacks.watchdog import DUMP_SIGNAL
from dmc.training.module import RetrofitModule


def test_run_that_hangs_writes_its_stacks_and_says_where(run_values, tmp_path):
    run_values["training"]["hang_timeout_minutes"] = 1 / 60
    stacks, log = Path(run_values["output_dir"]) / "stacks" / "rank0.txt", tmp_path / "log"
    with Ranks(run_values, 1, log, functools.partial(hang_at, step=3)) as ranks:
        deadline = time.monotonic() + 60
        while not (stacks.exists() and "training_step" in stacks.read_text() and str(stacks) in log.read_text()):
            assert ranks.alive and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.05)
    assert 'launching.py", line' in stacks.read_text()
    assert f"nothing has moved for 1 s in step 3: stacks of all threads are in {stacks}" in log.read_text()


def test_signal_writes_the_stacks_of_a_run_that_goes_on(run_config, monkeypatch):
    plain = RetrofitModule.loss_at

    def loss_at(self, step, batch):
        if step == 3 and not self.noted:
            os.kill(os.getpid(), DUMP_SIGNAL)
        return plain(self, step, batch)

    monkeypatch.setattr(RetrofitModule, "loss_at", loss_at)
    before = signal.getsignal(DUMP_SIGNAL)
    run = train(run_config)
    assert (run.folder / "stacks" / "rank0.txt").read_text().count("most recent call first") >= 1
    assert "loss_at" in (run.folder / "stacks" / "rank0.txt").read_text()
    assert signal.getsignal(DUMP_SIGNAL) == before
