"""However the weights lie over the ranks: the same losses, the same exported folder, and resuming at any number."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from launching import logged_losses, train_ranks

from dmc.config import RunConfig, build_config
from dmc.models import load_model
from dmc.training import train
from dmc.training.exporter import export_checkpoint
from dmc.training.generations import remove

STEPS = 20
STRATEGIES = ("ddp", "fsdp2", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")


@pytest.fixture
def values(run_values):
    run_values["training"] |= {
        "stages": [{"name": "zero_out", "steps": 5}, {"name": "retrofit", "steps": STEPS - 5}],
        "batch_size": 6, "micro_batch_size": 6, "validate_every_steps": 10, "snapshot_ratios": [], "checkpoint_every_steps": 10,
    }  # fmt: skip
    return run_values


def on_ranks(values, count, folder, strategy, **training):
    values = {**values, "output_dir": str(folder), "training": {**values["training"], **training}}
    values["trainer"] = values["trainer"] | {"devices": count, "strategy": strategy}
    train_ranks(values, count, folder.with_suffix(".log"))
    return folder


@pytest.fixture(scope="session")
def alone_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("alone") / "run"


@pytest.fixture
def alone(values, alone_folder):
    """The run of one process, made once."""
    return train(build_config(RunConfig, dict(values, output_dir=str(alone_folder)))).folder


def assert_same_losses(one: Path, other: Path) -> None:
    expected, got = logged_losses(one), logged_losses(other)
    assert sorted(expected) == sorted(got) == list(range(STEPS))
    assert max(abs(got[step] - expected[step]) for step in expected) <= 1e-5


def assert_same_folder(one: Path, other: Path) -> None:
    model, same = load_model(one), load_model(other)
    assert model.compression == same.compression
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, same.state_dict()[name], atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_learn_what_one_with_the_doubled_batch_does(values, alone, strategy, tmp_path):
    folder = on_ranks(values, 2, tmp_path / strategy, strategy, micro_batch_size=3)
    assert_same_losses(alone, folder)
    assert_same_folder(alone / "final", folder / "final")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulation_and_recomputed_activations_change_nothing(values, alone, strategy, tmp_path):
    options = {"micro_batch_size": 1, "activation_checkpointing": True}
    folder = on_ranks(values, 2, tmp_path / strategy, strategy, **options)
    assert_same_folder(alone / "final", folder / "final")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_checkpoints_of_two_ranks_export_and_resume_on_one_and_three(values, alone, strategy, tmp_path):
    folder = on_ranks(values, 2, tmp_path / strategy, strategy, micro_batch_size=3)
    assert_same_folder(alone / "final", export_checkpoint(folder, tmp_path / "exported"))
    (folder / "final" / "retrofit.json").unlink()
    for path in (folder / "checkpoints" / "last.ckpt", folder / "final"):
        remove(path)
    for count in (1, 3):
        resumed = tmp_path / f"on_{count}"
        shutil.copytree(folder, resumed)
        on_ranks(values, count, resumed, strategy, micro_batch_size=6 // count)
        assert [json.loads(line)["step"] for line in (resumed / "starts.jsonl").read_text().splitlines()] == [0, 10]
        assert_same_losses(alone, resumed)
        assert_same_folder(alone / "final", resumed / "final")
