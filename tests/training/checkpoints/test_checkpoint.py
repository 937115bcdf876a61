import multiprocessing
import os
import pickle
import resource
import signal

import pytest
import torch

from dmc.config import RunConfig, build_config
from dmc.models import load_model
from dmc.training import train
from dmc.training.checkpoints.reading import check_fits, find_checkpoint, load_checkpoint_model, read_header
from dmc.training.checkpoints.saving import AtomicCheckpointIO


@pytest.fixture
def checkpoint_path(run_config):
    return train(run_config).folder / "checkpoints" / "last.ckpt"


def test_model_comes_back_from_a_checkpoint_alone(checkpoint_path):
    model = load_checkpoint_model(checkpoint_path)
    exported = load_model(checkpoint_path.parent.parent / "final")
    for name, value in exported.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_truncated_checkpoint_says_so(checkpoint_path):
    content = checkpoint_path.read_bytes()
    for size in (0, 100, len(content) // 2, len(content) - 1):
        checkpoint_path.write_bytes(content[:size])
        with pytest.raises(ValueError, match="cut off or is no training checkpoint"):
            read_header(checkpoint_path)


def test_foreign_files_are_refused(tmp_path):
    foreign = tmp_path / "foreign.ckpt"
    torch.save({"weights": torch.zeros(2)}, foreign)
    with pytest.raises(ValueError, match="are expected in it"):
        read_header(foreign)
    with pytest.raises(FileNotFoundError, match=r"last.ckpt"):
        read_header(tmp_path / "absent.ckpt")


def test_checkpoint_with_code_is_refused(tmp_path):
    class Harmful:
        def __reduce__(self):
            return (print, ("executed",))

    path = tmp_path / "harmful.ckpt"
    with path.open("wb") as file:
        pickle.dump({"state_dict": Harmful()}, file)
    with pytest.raises(ValueError, match="is no training checkpoint"):
        read_header(path)


def test_checkpoint_of_another_model_says_what_differs(checkpoint_path):
    checkpoint, model = torch.load(checkpoint_path), load_checkpoint_model(checkpoint_path)
    name = next(iter(checkpoint["state_dict"]))
    other = checkpoint_path.with_name("other.ckpt")
    torch.save(dict(checkpoint, state_dict={**checkpoint["state_dict"], name: torch.zeros(3)}), other)
    with pytest.raises(ValueError, match=r"has shape \(3,\) in the checkpoint"):
        check_fits(other, model, "file")
    torch.save(dict(checkpoint, state_dict={k: v for k, v in checkpoint["state_dict"].items() if k != name}), other)
    with pytest.raises(ValueError, match="1 weights missing"):
        check_fits(other, model, "file")


def test_failed_write_leaves_the_checkpoint_before(tmp_path):
    path = tmp_path / "last.ckpt"
    writer = AtomicCheckpointIO()
    writer.save_checkpoint({"a": 1}, path)
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        writer.save_checkpoint({"a": lambda: None}, path)
    assert torch.load(path, weights_only=True) == {"a": 1}
    assert [item.name for item in tmp_path.iterdir()] == ["last.ckpt"]


def test_full_disk_leaves_the_checkpoint_before(tmp_path):
    path = tmp_path / "last.ckpt"
    writer = AtomicCheckpointIO()
    writer.save_checkpoint({"step": 1, "weights": torch.zeros(10)}, path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"last.ckpt could not be written .*the checkpoint before it stays"):
            writer.save_checkpoint({"step": 2, "weights": torch.zeros(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert torch.load(path)["step"] == 1
    assert [item.name for item in tmp_path.iterdir()] == ["last.ckpt"]


def save_and_die(path, when):
    """Write a second checkpoint and be killed on the way."""
    writer = AtomicCheckpointIO()
    writer.save_checkpoint({"step": 1}, path)
    replace, calls = os.replace, []

    def kill_after(*places):
        replace(*places)
        calls.append(places)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def write_half(checkpoint, file):
        file.write(b"half a checkpoint")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    if when == "between the renames":
        os.replace = kill_after
    else:
        torch.save = write_half
    writer.save_checkpoint({"step": 2}, path)


@pytest.mark.parametrize(("when", "left"), [("in mid-write", "last.ckpt"), ("between the renames", "previous.ckpt")])
def test_kill_while_saving_leaves_a_whole_checkpoint_that_is_found(tmp_path, when, left):
    process = multiprocessing.get_context("fork").Process(target=save_and_die, args=(tmp_path / "last.ckpt", when))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([left, "last.ckpt.partial"])
    assert torch.load(tmp_path / left) == {"step": 1}


def test_absent_last_checkpoint_is_the_previous_one(checkpoint_path):
    folder, model = checkpoint_path.parent, load_checkpoint_model(checkpoint_path)
    assert find_checkpoint(folder, model) == checkpoint_path
    checkpoint_path.unlink()
    assert find_checkpoint(folder, model) == folder / "previous.ckpt"
    (folder / "previous.ckpt").unlink()
    assert find_checkpoint(folder, model) is None


def test_damaged_checkpoint_is_refused_and_the_previous_one_offered(run_values):
    run_values["training"] |= {"checkpoint_every_steps": 3}
    run = train(build_config(RunConfig, run_values))
    (run.final / "retrofit.json").unlink()  # as if killed before the export
    folder = run.folder / "checkpoints"
    last, previous = folder / "last.ckpt", folder / "previous.ckpt"
    whole = last.read_bytes()
    last.write_bytes(whole[: len(whole) // 2])
    offer = rf"last.ckpt is cut off.*use_previous_checkpoint=true to go on from step 6, which {previous} holds"
    with pytest.raises(ValueError, match=offer):
        train(build_config(RunConfig, run_values))
    model, good = load_model(run.final).state_dict(), previous.read_bytes()
    train(build_config(RunConfig, dict(run_values, use_previous_checkpoint=True)))
    assert previous.read_bytes() == good  # the damaged one never took its place
    assert read_header(last).global_step == 8
    for name, value in load_model(run.final).state_dict().items():
        assert torch.equal(value, model[name]), name


def test_checkpoint_of_another_run_is_refused_and_the_previous_one_offered(checkpoint_path):
    folder, model = checkpoint_path.parent, load_checkpoint_model(checkpoint_path)
    foreign = torch.load(checkpoint_path)
    foreign["state_dict"] = {name: torch.zeros(3) for name in foreign["state_dict"]}
    torch.save(foreign, checkpoint_path)
    with pytest.raises(ValueError, match=r"does not fit the model.*use_previous_checkpoint=true"):
        find_checkpoint(folder, model)
    assert find_checkpoint(folder, model, use_previous=True) == folder / "previous.ckpt"
    (folder / "previous.ckpt").write_bytes(b"damaged as well")
    with pytest.raises(ValueError, match=r"last.ckpt does not fit the model: .* has shape"):
        find_checkpoint(folder, model, use_previous=True)


def test_run_killed_before_its_export_exports_what_it_has_saved(run_config):
    run = train(run_config)
    before = (run.final / "model.safetensors").read_bytes()
    (run.final / "retrofit.json").unlink()
    train(run_config)
    assert (run.final / "model.safetensors").read_bytes() == before
