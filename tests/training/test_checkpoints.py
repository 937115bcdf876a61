import json
import multiprocessing
import os
import pickle
import resource
import signal
import threading

import pytest
import torch
from launching import logged_losses
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as distributed_checkpoint

from dmc.config import build_config
from dmc.models import load_model
from dmc.training.checkpoints import (
    CheckpointSaver,
    Header,
    check_fits,
    find_checkpoint,
    load_checkpoint_model,
    read_header,
    read_state,
    read_tensors,
    saved_checkpoints,
    step_name,
    storage_writer,
)
from dmc.training.config import RunConfig
from dmc.training.export import export_checkpoint
from dmc.training.optimizer_step import OptimizerStep
from dmc.training.run import train
from dmc.training.stages import Plan

WEIGHTS = {"norm.weight": torch.randn(200), "head.weight": torch.randn(30, 20), "tied.weight": torch.zeros(30, 20)}


class Model(torch.nn.Module):
    """What a header says of a model; its output is tied."""

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def state_dict(self, *, keep_vars=False):
        return self.weights


MODEL = Model({**WEIGHTS, "tied.weight": WEIGHTS["head.weight"]})


@pytest.fixture
def saver(tmp_path):
    return CheckpointSaver()


def save(saver, folder, step=1, weights=None):
    """Write a checkpoint as a strategy of one rank does, and wait for it."""

    def write(partial):
        tensors = {f"model.{name}": weight for name, weight in (weights or WEIGHTS).items() if name != "tied.weight"}
        tensors["optimizer.norm.weight.exp_avg"] = torch.ones(200)
        torch.save({}, partial / "trainer.pt")
        return distributed_checkpoint.async_save(
            tensors, storage_writer=storage_writer(partial, tensors, 1), no_dist=True
        )

    saver.save(folder / step_name(step), Header(step, {}), write)
    saver.wait()
    return folder / step_name(step)


def test_what_is_saved_is_the_moment_at_which_saving_begins(saver, tmp_path):
    weights = {name: value.clone() for name, value in WEIGHTS.items()}

    def write(partial):
        torch.save({}, partial / "trainer.pt")
        writer = storage_writer(partial, weights, 1)
        writing = distributed_checkpoint.async_save(dict(weights), storage_writer=writer, no_dist=True)
        for weight in weights.values():
            weight.zero_()  # as the next optimizer step changes it in place
        return writing

    saver.save(tmp_path / step_name(1), Header(1, {}), write)
    saver.wait()
    assert torch.equal(read_tensors(tmp_path / step_name(1), "")["norm.weight"], WEIGHTS["norm.weight"])


def test_foreign_folders_are_refused(tmp_path):
    (tmp_path / "foreign").mkdir()
    torch.save({"weights": torch.zeros(2)}, tmp_path / "foreign" / "model.pt")
    with pytest.raises(ValueError, match="is no training checkpoint"):
        read_header(tmp_path / "foreign")
    with pytest.raises(FileNotFoundError, match="does not exist: expected a checkpoint"):
        read_header(tmp_path / "absent")


def test_checkpoint_of_another_model_says_what_differs(saver, tmp_path):
    folder = save(saver, tmp_path)
    assert check_fits(folder, MODEL).global_step == 1
    with pytest.raises(ValueError, match=r"norm.weight has shape \(200,\) in the checkpoint and \(3,\)"):
        check_fits(folder, Model(MODEL.weights | {"norm.weight": torch.zeros(3)}))
    with pytest.raises(ValueError, match="1 weights missing"):
        check_fits(folder, Model(MODEL.weights | {"new.weight": torch.zeros(3)}))


def test_failed_write_leaves_the_checkpoint_before(saver, tmp_path):
    save(saver, tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"step_0000002 could not be written .*the checkpoint before it stays"):
            save(saver, tmp_path, 2, weights={"norm.weight": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert read_header(saved_checkpoints(tmp_path)[0]).global_step == 1
    save(saver, tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [step_name(1), step_name(3)]


def test_what_a_failed_write_has_left_takes_no_room_from_the_next(saver, tmp_path):
    save(saver, tmp_path)
    (tmp_path / "step_0000007.partial").mkdir()
    (tmp_path / "step_0000007.partial" / "shard-00001.safetensors").write_bytes(bytes(100))

    def write(partial):
        assert sorted(path.name for path in tmp_path.iterdir()) == [step_name(1), f"{step_name(5)}.partial"]
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        saver.save(tmp_path / step_name(5), Header(5, {}), write)


def save_and_die(folder, when):
    """Write a third checkpoint and be killed on the way."""
    saver = CheckpointSaver()
    for step in (1, 2):
        save(saver, folder, step)
    plain = {"rename": os.replace, "header": distributed_checkpoint.async_save}

    def kill_after_rename(*places):
        plain["rename"](*places)
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_after_tensors(*tensors, **options):
        plain["header"](*tensors, **options).result()
        os.kill(os.getpid(), signal.SIGKILL)

    if when == "after the rename":
        os.replace = kill_after_rename
    else:
        distributed_checkpoint.async_save = kill_after_tensors
    save(saver, folder, 3)


@pytest.mark.parametrize(("when", "left"), [("before the header", [1, 2, 3]), ("after the rename", [1, 2, 3])])
def test_kill_while_saving_leaves_a_complete_checkpoint_that_is_found(tmp_path, saver, when, left):
    process = multiprocessing.get_context("fork").Process(target=save_and_die, args=(tmp_path, when))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    names = [step_name(step) for step in left]
    if when == "before the header":
        names[-1] += ".partial"
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    step = read_header(saved_checkpoints(tmp_path)[0]).global_step
    assert step == (2 if when == "before the header" else 3)
    saver.last = tmp_path / step_name(step)
    save(saver, tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [step_name(step), step_name(4)]


def test_a_complete_checkpoint_is_found_at_every_moment(saver, tmp_path):
    seen, done = [], threading.Event()

    def read():
        while not done.is_set():
            found = saved_checkpoints(tmp_path)
            seen.append(json.loads((found[0] / "header.json").read_text())["global_step"] if found else 0)

    save(saver, tmp_path, 1)
    reader = threading.Thread(target=read)
    reader.start()
    for step in range(2, 12):
        save(saver, tmp_path, step)
    done.set()
    reader.join()
    assert seen == sorted(seen) and 0 not in seen
    assert sorted(path.name for path in tmp_path.iterdir()) == [step_name(10), step_name(11)]


def test_the_last_step_is_not_saved_again(saver, tmp_path):
    for step in (1, 2):
        save(saver, tmp_path, step)
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    save(saver, tmp_path, 2)
    assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == before


def test_what_lies_beyond_the_step_that_a_run_goes_on_from_gives_way(saver, tmp_path):
    for step in (6, 8):
        save(saver, tmp_path, step)
    resumed = CheckpointSaver()
    resumed.last = tmp_path / step_name(6)
    save(resumed, tmp_path, 7)
    assert [path.name for path in saved_checkpoints(tmp_path)] == [step_name(7), step_name(6)]
    resumed.last = tmp_path / step_name(6)  # again, and now 7 is damaged
    (tmp_path / step_name(7) / "header.json").unlink()
    save(resumed, tmp_path, 7)
    assert [read_header(path).global_step for path in saved_checkpoints(tmp_path)] == [7, 6]


def test_absent_last_checkpoint_is_the_previous_one(saver, tmp_path):
    for path in [save(saver, tmp_path, step) for step in (1, 2)][::-1]:
        assert find_checkpoint(tmp_path, model=MODEL) == path
        path.rename(path.with_name(f"{path.name}.partial"))
    assert find_checkpoint(tmp_path, model=MODEL) is None


@pytest.mark.parametrize("damage", ["a shard is cut off", "a shard is missing", "the state is cut off"])
def test_damaged_checkpoint_is_refused_and_the_previous_one_offered(saver, tmp_path, damage):
    previous, last = (save(saver, tmp_path, step) for step in (1, 2))
    file = last / "trainer.pt" if "state" in damage else next(last.glob("shard-*"))
    if "missing" in damage:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    offer = f"{last.name} is cut off: {file.name} .*use_previous_checkpoint=true to go on from step 1, which {previous}"
    with pytest.raises(ValueError, match=offer):
        find_checkpoint(tmp_path, model=MODEL)
    assert find_checkpoint(tmp_path, True, MODEL) == find_checkpoint(tmp_path, True) == previous


def test_a_run_goes_on_from_the_previous_checkpoint_as_if_the_last_had_never_been(run_values, tmp_path):
    run_values["training"] |= {"checkpoint_every_steps": 3}
    config = build_config(RunConfig, run_values)
    run = train(config)
    (run.final / "retrofit.json").unlink()  # as if killed before the export
    last, previous = saved_checkpoints(run.folder / "checkpoints")
    shard = next(last.glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match="use_previous_checkpoint=true"):
        train(config)
    with pytest.raises(ValueError, match="use_previous_checkpoint=true"):
        export_checkpoint(run.folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export_checkpoint(run.folder, tmp_path / "out", use_previous_checkpoint=True)
    model = load_checkpoint_model(previous).state_dict()
    for name, value in load_model(tmp_path / "out").state_dict().items():
        assert torch.equal(value, model[name]), name
    model, losses = load_model(run.final).state_dict(), logged_losses(run.folder)
    train(build_config(RunConfig, dict(run_values, use_previous_checkpoint=True)))
    assert read_header(last).global_step == 8 and read_header(previous).global_step == 6
    assert logged_losses(run.folder) == losses
    for name, value in load_model(run.final).state_dict().items():
        assert torch.equal(value, model[name]), name


def test_what_torch_cannot_read_is_told_in_one_line(saver, tmp_path):
    folder = save(saver, tmp_path)
    shard = next(folder.glob("shard-*"))
    shard.write_bytes(bytes(len(shard.read_bytes())))  # as long as before
    with pytest.raises(ValueError, match=r"^[^\n]*step_0000001 is damaged \([^\n]*remove this folder to go on[^\n]*$"):
        read_tensors(folder, "model.")


def test_the_state_of_another_version_is_told_in_one_line(run_config):
    step = OptimizerStep(Plan(run_config.training, 4.0), run_config.training)
    for state in ({}, {"optimization": {"skipped_steps": 0}}):
        with pytest.raises(ValueError, match=r"lacks '\w+': another version of dmc has written it"):
            step.on_load_checkpoint(None, None, state)


class Harmful:
    """Runs code where it is unpickled."""

    def __reduce__(self):
        return (print, ("executed",))


def put_a_pickle(folder):
    """Put a pickled value in the place of the weights."""
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(pickle.dumps(Harmful()).ljust(file.stat().st_size))


def put_torchs_pickle(folder):
    """Write what torch would unpickle, as a checkpoint of an older version."""
    for file in folder.glob("*.safetensors"):
        file.unlink()
    distributed_checkpoint.save({"model.norm.weight": Harmful()}, checkpoint_id=folder, no_dist=True)


def lead_outside(folder):
    header = json.loads((folder / "header.json").read_text())
    files = {f"../{folder.name}/{name}": size for name, size in header["files"].items()}
    (folder / "header.json").write_text(json.dumps(header | {"files": files}))


def name_no_files(folder):
    """As a checkpoint of an older version."""
    header = json.loads((folder / "header.json").read_text())
    del header["files"]
    (folder / "header.json").write_text(json.dumps(header))


def name_no_sizes(folder):
    header = json.loads((folder / "header.json").read_text())
    (folder / "header.json").write_text(json.dumps(header | {"files": [*header["files"]]}))


def forget_the_offsets(folder):
    (file,) = folder.glob("*.safetensors")
    save_file(load_file(file), file, {"DCP_SHARDING_INFO": "{}", "padding": 9999 * "x"})


def test_a_state_with_code_is_refused(saver, tmp_path, capsys):
    folder = save(saver, tmp_path)
    torch.save(Harmful(), folder / "trainer.pt")
    with pytest.raises(ValueError, match=r"is damaged \(trainer.pt: "):
        read_state(folder)
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "spoil", [put_a_pickle, put_torchs_pickle, lead_outside, name_no_files, name_no_sizes, forget_the_offsets]
)
def test_a_folder_with_code_or_a_way_out_or_of_another_version_is_refused(saver, tmp_path, spoil, capsys):
    folder = save(saver, tmp_path)
    spoil(folder)
    for read in (load_checkpoint_model, lambda folder: check_fits(folder, MODEL)):
        with pytest.raises(ValueError, match=r"^[^\n]*(no training checkpoint|is damaged|is cut off)[^\n]*$"):
            read(folder)
    assert "executed" not in capsys.readouterr().out


def test_files_are_cut_and_read_together(saver, tmp_path, monkeypatch):
    monkeypatch.setattr("dmc.training.checkpoints.FILE_BYTES", 900)
    folder = save(saver, tmp_path)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(names) > 1 and sorted(read_header(folder).files) == names
    weights = read_tensors(folder, "model.")
    assert weights.keys() == WEIGHTS.keys() - {"tied.weight"}
    assert all(torch.equal(weight, WEIGHTS[name]) for name, weight in weights.items())


def test_checkpoint_of_another_run_is_refused_and_the_previous_one_offered(saver, tmp_path):
    save(saver, tmp_path, 1)
    save(saver, tmp_path, 2, weights={name: torch.zeros(3) for name in WEIGHTS})
    with pytest.raises(ValueError, match=r"does not fit the model.*use_previous_checkpoint=true"):
        find_checkpoint(tmp_path, model=MODEL)
    assert find_checkpoint(tmp_path, True, MODEL) == tmp_path / step_name(1)
    (tmp_path / step_name(1) / "header.json").write_bytes(b"damaged as well")
    with pytest.raises(ValueError, match=r"step_0000002 does not fit the model: .* has shape"):
        find_checkpoint(tmp_path, True, MODEL)


def test_milestones_keep_the_state_of_the_optimizer_and_a_model_comes_back_from_the_last_checkpoint(run_values):
    run_values["training"] |= {"milestones": {"every_steps": 3, "ratios": [2.0, 4.0]}}
    run = train(build_config(RunConfig, run_values))
    steps = {path.name: read_header(path).global_step for path in (run.folder / "milestones").iterdir()}
    assert steps == {"cr2": 4, "cr4": 6, "step_0000003": 3, "step_0000006": 6}
    one, other = (read_tensors(run.folder / "milestones" / name, "") for name in ("cr4", "step_0000006"))
    assert any(name.endswith(".exp_avg_sq") for name in one)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert [path.name for path in saved_checkpoints(run.folder / "checkpoints")] == [step_name(8), step_name(7)]
    exported, model = load_model(run.final), load_checkpoint_model(saved_checkpoints(run.folder / "checkpoints")[0])
    for name, value in exported.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_generation_settings_come_back_from_a_checkpoint(run_values, folders, only_trained):
    settings = {"do_sample": False, "temperature": 0.9, "eos_token_id": [3, 5]}
    (folders.stock / "generation_config.json").write_text(json.dumps(settings))
    del run_values["base"]
    run_values |= {"model": str(folders.stock)}
    run_values["data"]["tokenizer"] = {}
    run_values["training"] |= {"stages": {"retrofit": {"length": "1 steps"}}}
    run = train(build_config(RunConfig, run_values))
    found = load_checkpoint_model(saved_checkpoints(run.folder / "checkpoints")[0]).generation_config
    assert {name: getattr(found, name) for name in settings} == settings
