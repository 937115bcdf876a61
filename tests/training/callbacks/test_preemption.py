import json
import os
import signal
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launching import logged_losses

from dmc.config import build_config
from dmc.ranks import ALONE
from dmc.training.callbacks.preemption import SIGNALS, PreemptedError, Preemption, requeue_job
from dmc.training.callbacks.validation import Validation
from dmc.training.checkpoints import read_header, step_name
from dmc.training.config import RunConfig
from dmc.training.run import train

ALONE_MODULE = SimpleNamespace(strategy=SimpleNamespace(hosts=ALONE))


@pytest.fixture
def fake_scontrol(tmp_path, monkeypatch):
    """Put a scontrol on the path that writes down how it was called."""
    calls = tmp_path / "calls"
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return lambda: calls.read_text().split("\n")[:-1] if calls.exists() else []


def test_each_signal_saves_and_stops_after_the_step_and_the_next_start_goes_on(run_values, tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    plain, coming = Validation.log_score, []

    def log_score(self, trainer, score):
        if coming:
            os.kill(os.getpid(), coming.pop())  # in the middle of a step
        plain(self, trainer, score)

    monkeypatch.setattr(Validation, "log_score", log_score)
    run_values["training"] |= {"snapshot_ratios": [2.0], "calibrate": False}
    uninterrupted = train(build_config(RunConfig, dict(run_values, output_dir=str(tmp_path / "whole"))))
    run_values["training"]["checkpoint_every_steps"] = 100
    handlers = {item: signal.getsignal(item) for item in SIGNALS}
    for number in sorted(SIGNALS):
        folder = tmp_path / number.name
        config = build_config(RunConfig, dict(run_values, output_dir=str(folder)))
        coming.append(number)
        with pytest.raises(PreemptedError, match="after step 4 of 8"):
            train(config)
        assert {item: signal.getsignal(item) for item in SIGNALS} == handlers
        assert read_header(folder / "checkpoints" / step_name(4)).global_step == 4
        assert logged_losses(train(config).folder) == logged_losses(uninterrupted.folder)
        assert [json.loads(line)["step"] for line in (folder / "starts.jsonl").read_text().splitlines()] == [0, 4]


class FakeTrainer(SimpleNamespace):
    """What a callback sees of a trainer."""

    def __init__(self, rank=0):
        super().__init__(global_step=0, max_steps=8, is_global_zero=rank == 0, saved=[])


class OtherRank:
    """What another rank says: stop, requeue."""

    def __init__(self, *flags):
        self.flags = torch.tensor(flags).long()

    def all_reduce(self, received):
        return received + self.flags


class FakeSaver:
    folder = Path("run/checkpoints")

    def save(self, trainer, step):
        trainer.saved.append(step)


@pytest.mark.parametrize(
    ("number", "rank", "others", "calls"),
    [
        (signal.SIGUSR1, 0, None, ["requeue 17"]), (signal.SIGTERM, 0, None, []),
        (None, 1, OtherRank(True, True), []),
    ],
    ids=["requeue", "terminate", "another rank's"],
)  # fmt: skip
def test_signal_is_acted_upon_after_the_micro_batch_in_which_it_comes(
    number, rank, others, calls, fake_scontrol, monkeypatch
):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    trainer = FakeTrainer(rank)
    trainer.global_step = 3  # whole steps: the next one is under way
    with Preemption(FakeSaver(), None) as preemption:
        preemption.on_train_start(trainer, ALONE_MODULE)
        preemption.stop_if_signaled(trainer, None)
        assert not trainer.saved
        preemption.hosts = others or preemption.hosts
        if number is not None:
            os.kill(os.getpid(), number)
        with pytest.raises(PreemptedError, match="after step 3 of 8, which is saved"):
            preemption.stop_if_signaled(trainer, None)
    assert trainer.saved == [3]
    assert fake_scontrol() == calls


def test_signal_before_the_first_step_is_done_stops_with_nothing_to_save():
    trainer = FakeTrainer()
    with Preemption(FakeSaver(), None) as preemption:
        os.kill(os.getpid(), signal.SIGUSR1)  # while the model is loaded: the default would kill
        preemption.on_train_start(trainer, ALONE_MODULE)
        with pytest.raises(PreemptedError, match="with nothing to save yet"):
            preemption.stop_if_signaled(trainer, None)
    assert trainer.saved == []


def test_task_of_an_array_requeues_itself_alone(fake_scontrol, monkeypatch):
    for name, value in (("JOB_ID", "20"), ("ARRAY_JOB_ID", "20"), ("ARRAY_TASK_ID", "4")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    requeue_job()
    assert fake_scontrol() == ["requeue 20_4"]


def test_refused_requeue_is_told(fake_scontrol, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\necho not allowed >&2; exit 1\n")
    requeue_job()
    assert "scontrol requeue 17 failed (not allowed): submit the job again" in caplog.text
