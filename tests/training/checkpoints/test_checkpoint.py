import io
import json
import multiprocessing
import os
import pickle
import resource
import signal
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import checkpoint as distributed_checkpoint

from dmc.config import RunConfig, build_config
from dmc.models import load_model
from dmc.training import export_checkpoint, train
from dmc.training.checkpoints.folder import CheckpointFolders
from dmc.training.checkpoints.reading import (
    check_fits,
    check_whole,
    choose,
    find_checkpoint,
    load_checkpoint_model,
    read_header,
    read_weights,
)
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


def flip_bytes(path, count, start=0.3):
    """Spoil `count` bytes in a row: a file keeps its length, and what says where its tensors are."""
    content = bytearray(path.read_bytes())
    first = int(start * len(content))
    content[first : first + count] = bytes(byte ^ 0x11 for byte in content[first : first + count])
    path.write_bytes(content)


def test_flipped_bytes_are_found_before_a_run_goes_on_or_is_exported(run_values, tmp_path):
    run_values["training"] |= {"checkpoint_every_steps": 3, "snapshot_ratios": []}
    config = build_config(RunConfig, run_values)
    run = train(config)
    (run.final / "retrofit.json").unlink()  # as if killed before the export
    last, previous = (run.folder / "checkpoints" / name for name in ("last.ckpt", "previous.ckpt"))
    flip_bytes(last, 15_000)
    offer = rf"last.ckpt is damaged: .* has a wrong checksum.*use_previous_checkpoint=true.* step 6, which {previous}"
    with pytest.raises(ValueError, match=offer):
        train(config)
    with pytest.raises(ValueError, match=offer):
        export_checkpoint(run.folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export_checkpoint(run.folder, tmp_path / "out", use_previous_checkpoint=True)
    model = load_checkpoint_model(previous).state_dict()
    for name, value in load_model(tmp_path / "out").state_dict().items():
        assert torch.equal(value, model[name]), name
    train(build_config(RunConfig, dict(run_values, use_previous_checkpoint=True)))
    assert read_header(last).global_step == 8


@pytest.mark.parametrize("share", [0.05, 0.2, 0.4, 0.6, 0.8, 0.99])
def test_any_flipped_byte_of_a_tensor_is_found(tmp_path, share):
    path = tmp_path / "last.ckpt"
    content = {"global_step": 1, "state_dict": {f"w{i}": torch.randn(100) for i in range(10)}, "model_config": {}}
    AtomicCheckpointIO().save_checkpoint(content, path)
    check_whole(path)
    flip_bytes(path, 100, share)
    with pytest.raises(ValueError, match=r"is damaged|is cut off"):
        check_whole(path)


class OneRank:
    """What `CheckpointFolders` asks of Lightning's strategy."""

    world_size, global_rank, is_global_zero = 1, 0, True

    def __init__(self, weights):
        self.lightning_module = SimpleNamespace(model=SimpleNamespace(state_dict=lambda keep_vars: weights))

    def broadcast(self, value):
        return value

    def barrier(self):
        pass


@pytest.fixture
def save_folder(tmp_path):
    """Return a function that writes a sharded checkpoint as a strategy of one rank does."""
    weights = {"norm.weight": torch.randn(200), "head.weight": torch.randn(30, 20)}

    def write(checkpoint, folder):
        if checkpoint["format"] == "fsdp2":
            prefixed = {f"model.{name}": weight for name, weight in weights.items()}
            state = {"state_dict": prefixed, "optimizer_0": {"lr": 1e-3}}
            distributed_checkpoint.save(state, checkpoint_id=folder, no_dist=True)
            torch.save({"epoch": 0}, folder / "meta.pt")
        else:
            (folder / "checkpoint").mkdir(parents=True)
            (folder / "latest").write_text("checkpoint")
            torch.save({"module": weights}, folder / "checkpoint" / "mp_rank_00_model_states.pt")

    def save(format, step=1):
        target = tmp_path / "last.ckpt"
        folders.setdefault(format, CheckpointFolders(format)).save(
            OneRank(weights), {"format": format, "global_step": step, "model_config": {}}, target, write
        )
        return target

    folders = {}
    return save


@pytest.mark.parametrize("format", ["fsdp2", "deepspeed_zero2"])
def test_flipped_bytes_of_any_file_of_a_folder_are_found(save_folder, format):
    folder = save_folder(format)
    check_whole(folder)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        whole = path.read_bytes()
        flip_bytes(path, 1, 0.5)
        with pytest.raises(ValueError, match=r"is damaged|no training checkpoint"):
            check_whole(folder)
        with pytest.raises(ValueError, match=r"is damaged|no training checkpoint"):
            CheckpointFolders(format).check(OneRank({}), folder)
        path.write_bytes(whole)
    check_whole(folder)


def test_a_damaged_folder_offers_the_previous_one_and_an_old_one_loads(save_folder, caplog):
    for step in (5, 6):
        folder = save_folder("fsdp2", step)
    shard = max((path for path in folder.rglob("*.distcp")), key=lambda path: path.stat().st_size)
    flip_bytes(shard, 1, 0.5)
    offer = rf"last.ckpt is damaged: {shard.name} has a wrong checksum; .*use_previous_checkpoint=true .* step 5, which"
    with pytest.raises(ValueError, match=offer):
        CheckpointFolders("fsdp2").check(OneRank({}), folder)
    with pytest.raises(ValueError, match=offer):
        choose(folder.parent, check_whole, False)
    assert choose(folder.parent, check_whole, True) == folder.with_name("previous.ckpt")
    header = json.loads((folder / "header.json").read_text())
    del header["checksums"], header["checksum"]
    (folder / "header.json").write_text(json.dumps(header))
    check_whole(folder)
    CheckpointFolders("fsdp2").check(OneRank({}), folder)
    assert caplog.text.count("has no checksums, an earlier version wrote it") == 2


class Harmful:
    """Runs code where it is unpickled."""

    def __reduce__(self):
        return (print, ("executed",))


def spoil_metadata(folder):
    (folder / ".metadata").write_bytes(pickle.dumps(Harmful()))


def spoil_option(folder):
    """Put code where the optimizer's options lie in a shard."""
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    place = next(place for index, place in metadata.storage_data.items() if index.fqn == "optimizer_0.lr")
    content = io.BytesIO()
    torch.save(Harmful(), content)
    (folder / "options.distcp").write_bytes(content.getvalue())
    place.relative_path, place.offset, place.length = "options.distcp", 0, len(content.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def lead_outside(folder):
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    for place in metadata.storage_data.values():
        place.relative_path = f"../elsewhere/{place.relative_path}"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def spoil_states(folder):
    torch.save({"module": Harmful()}, folder / "checkpoint" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def spoil_old_states(folder):
    (folder / "checkpoint" / "mp_rank_00_model_states.pt").write_bytes(pickle.dumps(Harmful()))


def name_another_folder(folder):
    (folder / "latest").write_text("../../elsewhere")


@pytest.mark.parametrize(
    ("format", "spoil"),
    [
        ("fsdp2", spoil_metadata), ("fsdp2", spoil_option), ("fsdp2", lead_outside), ("deepspeed_zero2", spoil_states),
        ("deepspeed_zero2", spoil_old_states), ("deepspeed_zero2", name_another_folder),
    ],
)  # fmt: skip
def test_a_folder_with_code_or_a_way_out_is_refused(save_folder, format, spoil, capsys):
    folder = save_folder(format)
    spoil(folder)
    header = json.loads((folder / "header.json").read_text())  # as one would that means harm
    del header["checksums"], header["checksum"], header["files"]
    (folder / "header.json").write_text(json.dumps(header))
    for read in (read_header, check_whole, read_weights):
        with pytest.raises(ValueError, match=r"no training checkpoint|would run builtins.print"):
            read(folder)
    assert "executed" not in capsys.readouterr().out


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
