"""Two processes train one run, are killed in every way, and go on as if nothing had happened."""

import json
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from export_faults import fail_to_describe, see_an_old_checkpoint
from launching import (
    Processes,
    Ranks,
    leave_time_to_kill,
    logged_losses,
    logged_parts,
    prepare,
    refuse_network,
    train_ranks,
)

from dmc.config import build_config
from dmc.models import load_model
from dmc.training.callbacks.preemption import EXIT_PREEMPTED
from dmc.training.checkpoints import read_header, saved_checkpoints, step_name
from dmc.training.config import RunConfig
from dmc.training.run import fresh_model
from dmc.training.text_data import build_tokenizer


@pytest.fixture
def two_ranks(run_values):
    run_values["trainer"] |= {"devices": 2, "strategy": "ddp"}
    run_values["training"] |= {"micro_batch_size": 1, "validate_every_steps": 1000}
    return run_values


def saved_step(folder):
    """Step of the checkpoint that the next start will take; 0 where there is none."""
    saved = saved_checkpoints(folder / "checkpoints")
    return read_header(saved[0]).global_step if saved else 0


def starts(folder):
    return [json.loads(line)["step"] for line in (folder / "starts.jsonl").read_text().splitlines()]


def wait_until(condition, ranks, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert ranks.alive, ranks.log.read_text()[-4000:]
        assert time.monotonic() < deadline, ranks.log.read_text()[-4000:]
        time.sleep(0.001)


def assert_same_run(one, other):
    assert logged_losses(one) == logged_losses(other)
    model, same = load_model(one / "final").state_dict(), load_model(other / "final").state_dict()
    assert all(torch.equal(value, same[name]) for name, value in model.items())


KILLS = (
    ("SIGKILL", 0), ("SIGKILL", 1), ("SIGKILL", 1), ("SIGTERM", 0), ("SIGTERM", 1), ("SIGTERM", 0, 1), ("SIGUSR1", 0),
    ("SIGUSR1", 1), ("while writing", 0), ("while writing", 0),
)  # fmt: skip


@pytest.mark.slow
def test_ten_kills_of_two_ranks_lose_nothing_beyond_the_last_save(two_ranks, tmp_path):
    steps = 120
    two_ranks["data"]["num_workers"] = 1
    two_ranks["training"] |= {
        "stages": {"zero_out": {"length": "15 steps"}, "retrofit": {"length": f"{steps - 15} steps"}},
        "checkpoint_every_steps": 5,
    }
    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    log = tmp_path / "ranks.log"
    train_ranks(dict(two_ranks, output_dir=str(uninterrupted)), 2, log)
    values = dict(two_ranks, output_dir=str(killed))
    chooser = random.Random(0)
    expected = [0]
    for what, *targets in chooser.sample(KILLS, len(KILLS)):
        parts, goal = len(logged_parts(killed)), expected[-1] + chooser.randint(1, 8)
        with Ranks(values, 2, log, partial(leave_time_to_kill, seconds=0.03)) as ranks:
            wait_until(lambda: len(logged_parts(killed)) > parts and goal in logged_parts(killed)[-1], ranks)
            if what == "while writing":
                wait_until(lambda: list((killed / "checkpoints").glob("*.partial")), ranks)
            ranks.send(signal.SIGKILL if what == "while writing" else getattr(signal, what), *targets)
            codes = ranks.join(grace=20 if what in ("SIGTERM", "SIGUSR1") else 1)
        if what in ("SIGTERM", "SIGUSR1"):
            assert codes == [EXIT_PREEMPTED, EXIT_PREEMPTED], f"{what}: {codes}\n{log.read_text()[-4000:]}"
            assert saved_step(killed) == max(logged_parts(killed)[-1]) + 1  # nothing is lost at all
        else:
            assert -signal.SIGKILL in codes and 0 not in codes
            assert saved_step(killed) >= (max(logged_losses(killed)) + 1) // 5 * 5 - 5
        expected.append(saved_step(killed))
        assert set(logged_losses(killed)) >= set(range(expected[-1]))
        assert expected[-1] >= expected[-2]
    assert expected[-1] < steps, "the run ended before the tenth kill"
    train_ranks(values, 2, log)
    assert starts(killed) == expected
    for part in logged_parts(killed):  # what was trained twice was trained equally
        assert part.items() <= logged_losses(uninterrupted).items()
    assert_same_run(killed, uninterrupted)


@pytest.mark.parametrize("prepared", [False, True], ids=["at the start", "prepared"])
def test_the_first_rank_of_a_node_alone_asks_the_hub_and_none_once_it_is_prepared(
    two_ranks, corpus, tmp_path, prepared
):
    """The model, its tokenizer, and text that is tokenized: rank 1 may connect to nothing but this machine."""
    hub = tmp_path / "hub"
    shutil.copytree(corpus, hub)
    base = build_config(RunConfig, two_ranks)
    tokenizer = build_tokenizer(base)
    fresh_model(base, len(tokenizer), 0).save_pretrained(hub / "model")
    tokenizer.save_pretrained(hub / "model")
    texts = {split: {"text": {"_target_": "dmc.data.TextSource", "name": f"hub/{name}"}}
             for split, name in (("train", "train"), ("validation", "held_out"))}  # fmt: skip
    two_ranks["data"] |= texts | {"cache_folder": str(tmp_path / "cache"), "tokenizer": {}}
    two_ranks["model"] = "hub/model"
    two_ranks["training"] |= {"stages": {"retrofit": {"length": "2 steps"}}, "calibrate": False}
    if prepared:
        with Processes(prepare, (two_ranks, hub), 1, log := tmp_path / "prepare.log") as preparing:
            assert preparing.join() == [0], log.read_text()[-4000:]
        (hub / "attempts_0").unlink()
    sabotage = partial(refuse_network, hub=hub, allowed=() if prepared else (0,))
    with Ranks(two_ranks, 2, log := tmp_path / "ranks.log", sabotage) as ranks:
        assert ranks.join() == [0, 0], log.read_text()[-4000:]
    assert not (hub / "attempts_1").exists()
    assert (hub / "attempts_0").exists() != prepared


def test_rank_zero_alone_writes_and_says_which_checkpoint_the_others_go_on_from(two_ranks, tmp_path):
    train_ranks(two_ranks, 2, log := tmp_path / "ranks.log")
    folder = Path(two_ranks["output_dir"])
    assert len(starts(folder)) == len(logged_parts(folder)) == 1
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [step_name(7), step_name(8)]
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock", "checkpoints", "final", "heatmaps", "logs", "packages.txt", "run.json", "starts.jsonl",
    ]  # fmt: skip
    expected = load_model(folder / "final").state_dict()
    (folder / "final").rename(tmp_path / "before")
    with Ranks(two_ranks, 2, log, see_an_old_checkpoint) as ranks:
        assert ranks.join() == [0, 0], log.read_text()[-4000:]
    assert starts(folder) == [0, 8]
    assert all(torch.equal(value, expected[name]) for name, value in load_model(folder / "final").state_dict().items())


def test_the_others_hear_why_rank_zero_could_not_export(two_ranks, tmp_path):
    two_ranks["training"] |= {"stages": {"retrofit": {"length": "1 steps"}}, "calibrate": False}
    with Ranks(two_ranks, 2, log := tmp_path / "ranks.log", fail_to_describe) as ranks:
        assert ranks.join() == [1, 1]
    assert "OSError: export 1 to" in log.read_text()
    assert "failed on the first rank: ValueError: these settings are refused" in log.read_text()
