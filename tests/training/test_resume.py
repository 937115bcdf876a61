"""Runs that are stopped and go on with other micro-batches or devices: every step consumes what it would have."""

import fcntl
import os
import shutil
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from launching import Ranks, logged_losses, note_positions, noted_positions

from dmc.config import build_config
from dmc.data import Positions
from dmc.training.callbacks.preemption import EXIT_PREEMPTED, PreemptedError
from dmc.training.checkpoints import TRAINER_STATE, read_tensors, saved_checkpoints, step_name
from dmc.training.config import RunConfig
from dmc.training.optimizer_step import OptimizerStep
from dmc.training.run import LOCK_NAME, RESTART_COUNTS, _alone_in, train

STEPS, BATCH = 7, 8
WHOLE = [(step, list(range(step * BATCH, step * BATCH + BATCH))) for step in range(STEPS)]


@pytest.fixture
def values(run_values, only_trained):
    """Settings of a run of which only the training matters."""
    run_values["base"]["shape"] |= {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    lengths = {"zero_out": 2, "retrofit": 4, "solidify": 1}
    run_values["training"] |= {
        "stages": {name: {"length": f"{steps} steps"} for name, steps in lengths.items()},
        "batch_size": BATCH, "micro_batch_size": 2, "sequence_length": 16,
        "ratio_control": {"gain": 0.05}, "checkpoint_every_steps": 100, "validate_every_steps": 100,
    }  # fmt: skip
    return run_values


@pytest.fixture
def train_part(tmp_path, monkeypatch):
    """Train one part of a run, noting positions, up to `stop`: whole steps, and micro-batches of the next."""

    def train_part(values, micro_batch_size, stop=None):
        values["training"]["micro_batch_size"] = micro_batch_size
        config = build_config(RunConfig, values)
        with monkeypatch.context() as patch:
            note_positions(0, tmp_path / "positions", stop, replace=patch.setattr)
            if stop is None:
                train(config)
                return
            with pytest.raises(PreemptedError, match=f"after step {stop[0]} of {STEPS}"):
                train(config)
        assert not (Path(config.output_dir) / "final").exists()

    return train_part


@pytest.mark.parametrize(
    ("sizes", "stops", "streaming"),
    [
        ((1, 4, 1, 8), [(1, 7), (3, 0), (3, 5)], False),
        ((8, 4, 2, 1), [(1, 0), (3, 1), (5, 3)], True),
        ((2, 2, 8), [(0, 1), (5, 3)], True),
    ],
    ids=str,
)
def test_steps_consume_the_same_with_every_other_micro_batch(values, train_part, tmp_path, sizes, stops, streaming):
    values["data"]["streaming"] = streaming
    for micro_batch_size, stop in zip(sizes, [*stops, None], strict=True):
        train_part(values, micro_batch_size, stop)
    assert noted_positions(tmp_path / "positions") == WHOLE
    assert (tmp_path / "run" / "final").exists()


@pytest.mark.parametrize("streaming", [pytest.param(False, marks=pytest.mark.slow), True], ids=["cached", "streaming"])
def test_steps_consume_the_same_on_one_rank_and_two(values, train_part, tmp_path, streaming):
    values["data"]["streaming"] = streaming
    train_part(values, 4, (2, 1))
    values["training"]["micro_batch_size"] = 1
    on_two = values | {"trainer": {**values["trainer"], "devices": 2, "strategy": "ddp"}}
    sabotage = partial(note_positions, log=tmp_path / "positions", stop=(5, 2), on_rank=1)
    with Ranks(on_two, 2, log := tmp_path / "ranks.log", sabotage) as ranks:
        assert ranks.join() == [EXIT_PREEMPTED] * 2, log.read_text()[-4000:]
    train_part(values, 2)
    assert noted_positions(tmp_path / "positions", ranks=range(2)) == WHOLE


def contents(run):
    """Return a run's last checkpoint but for Lightning's counters, and the place of its text."""
    last = saved_checkpoints(run / "checkpoints")[0]
    checkpoint = torch.load(last / TRAINER_STATE, weights_only=True)
    loader = checkpoint.pop("loops")["fit_loop"]["state_dict"].get("combined_loader")
    return checkpoint, loader, read_tensors(last, "")


def assert_equal(one, other):
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_equal(*pair)
    else:
        assert one == other


@pytest.mark.parametrize("streaming", [False, True], ids=["cached", "streaming"])
def test_run_stopped_within_a_step_equals_the_uninterrupted_one_bit_by_bit(values, train_part, tmp_path, streaming):
    values["data"]["streaming"] = streaming
    uninterrupted, within, between = (
        values | {"output_dir": str(tmp_path / name)} for name in ("whole", "within", "between")
    )
    train_part(uninterrupted, 2)
    train_part(within, 2, (3, 2))
    train_part(between, 2, (3, 0))
    assert_equal(contents(tmp_path / "within"), contents(tmp_path / "between"))
    train_part(within, 2)
    assert_equal(contents(tmp_path / "within"), contents(tmp_path / "whole"))
    assert logged_losses(tmp_path / "within") == logged_losses(tmp_path / "whole")


def test_run_stopped_again_before_its_next_step_keeps_both_checkpoints_as_they_are(values, train_part, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    train_part(values, 2, (4, 1))
    train_part(values, 2, (5, 0))
    before = files_of(folder)
    assert [path.name for path in saved_checkpoints(folder)] == [step_name(5), step_name(4)]
    train_part(values, 2, (5, 1))
    assert files_of(folder) == before


def test_run_stopped_before_its_first_step_is_done_begins_anew(values, train_part, tmp_path):
    train_part(values, 2, (0, 3))
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(("split", "streaming"), [("train", True), ("validation", False)])
def test_a_run_whose_text_has_changed_is_refused_until_it_is_put_back(
    values, train_part, tmp_path, corpus, split, streaming
):
    values["data"] |= {"streaming": streaming, "tokenizer": {"train_vocab_size": 300, "folder": str(tmp_path / "bpe")}}
    values["data"]["cache_folder"] = str(tmp_path / "cache")
    for name, folder in (("train", "train"), ("validation", "held_out")):
        shutil.copytree(corpus / folder, tmp_path / folder)
        values["data"][name] = {"wiki": {"_target_": "dmc.data.TextSource", "name": str(tmp_path / folder)}}
    train_part(values, 2, (2, 0))
    file = tmp_path / ("train" if split == "train" else "held_out") / "003.txt"
    text, times = file.read_text(), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    before = files_of(tmp_path / "run") | files_of(tmp_path / "bpe") | files_of(tmp_path / "cache")
    file.write_text(text.replace("line adds", "line eats"))
    os.utime(file, ns=times)
    with pytest.raises(ValueError, match=f"data.{split}.wiki has changed since the run in .*run began"):
        train(build_config(RunConfig, values))
    assert files_of(tmp_path / "run") | files_of(tmp_path / "bpe") | files_of(tmp_path / "cache") == before
    file.write_text(text)  # at another time, which is no other text
    train_part(values, 2)
    assert noted_positions(tmp_path / "positions") == WHOLE


def test_text_that_ends_too_early_exports_nothing(values, tmp_path, monkeypatch):
    monkeypatch.setattr(Positions, "__len__", lambda self: self.num_draws // self.world_size - BATCH)
    with pytest.raises(ValueError, match=f"text ended after step {STEPS - 1} of {STEPS}"):
        train(build_config(RunConfig, values))
    assert not (tmp_path / "run" / "final").exists()


def files_of(folder):
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_second_start_of_a_run_that_is_being_trained_is_refused_and_touches_nothing(values, tmp_path, monkeypatch):
    config = build_config(RunConfig, values)
    plain, starts = OptimizerStep.run, []

    def run(self, module, micro_batches):
        if module.global_step == 3 and not starts:
            starts.append(2)
            before = files_of(tmp_path)
            message = r"run is being trained: another process holds .*run/.lock .*choose another output_dir"
            with pytest.raises(BlockingIOError, match=message):
                train(config)
            assert files_of(tmp_path) == before
        return plain(self, module, micro_batches)

    monkeypatch.setattr(OptimizerStep, "run", run)
    train(config)
    assert starts


@pytest.mark.parametrize("count", RESTART_COUNTS)
def test_a_restarted_run_waits_for_the_lock_that_a_dead_node_has_left(tmp_path, monkeypatch, count):
    monkeypatch.setenv(count, "1")
    with (tmp_path / LOCK_NAME).open("w") as left:
        fcntl.flock(left, fcntl.LOCK_EX)
        with monkeypatch.context() as patch:
            patch.setattr("dmc.training.run.LOCK_SECONDS", 0.01)
            with pytest.raises(BlockingIOError, match="a dead node left it: remove it"), _alone_in(tmp_path):
                raise AssertionError
        timer = threading.Timer(0.5, left.close)
        timer.start()
        with _alone_in(tmp_path):
            assert left.closed


@pytest.mark.parametrize("others", [[], ["notes.txt"]], ids=["new", "occupied"])
def test_a_start_that_fails_leaves_its_folder_as_it_was(others, tmp_path):
    folder = tmp_path / "a" / "run"
    for name in others:
        folder.mkdir(parents=True)
        (folder / name).write_text("mine")
    with suppress(ValueError), _alone_in(folder):
        assert (folder / LOCK_NAME).exists()
        raise ValueError
    assert sorted(path.name for path in tmp_path.rglob("*")) == (["a", "notes.txt", "run"] if others else [])
