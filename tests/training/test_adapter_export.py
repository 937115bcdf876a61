import json
import shutil
from pathlib import Path

import pytest
import torch
from launching import train_ranks
from safetensors.torch import load_file, save_file

from dmc import load_model
from dmc.commands.export import ExportConfig, export
from dmc.config import build_config
from dmc.training.checkpoints import load_checkpoint_model, saved_checkpoints, stored_tensors
from dmc.training.config import RunConfig
from dmc.training.model_folder import push
from dmc.training.run import train

GATES = {"gate_input": "hidden", "action": "drop", "delay": 2, "decision_scale": 4.0, "target_ratio": 2.0}
LEARNED = {"stages": {"retrofit": {"length": "2 steps"}}, "gates_only": True}
FITTED = {"stages": {}, "regression_init": {"sequences": 4}}
ADAPTER = {
    "README.md", "config.json", "dmc_gates.safetensors", "files.json", "generation_config.json", "retrofit.json",
    "tokenizer.json", "tokenizer_config.json",
}  # fmt: skip
IDS = torch.arange(2 * 24).reshape(2, 24)


@pytest.fixture
def trained(run_values, folders, tmp_path):
    """Return a function that trains gates on a stock model, as settings of the training say."""

    def trained(name="run", model=None, compression=GATES, **training):
        values = {**run_values, "model": str(model or folders.stock), "compression": compression}
        values["training"] = {**run_values["training"], "validate_every_steps": 9, **training}
        values["output_dir"] = str(tmp_path / name)
        return train(build_config(RunConfig, values))

    return trained


def logits(folder):
    return load_model(folder)(IDS, use_cache=False).logits


def base_of(folder):
    return Path(json.loads((folder / "config.json").read_text())["base_model_name_or_path"])


@pytest.mark.parametrize("learning", [LEARNED, FITTED])
def test_a_run_that_learns_gates_alone_writes_an_adapter_and_merges_it_when_asked(learning, trained, folders, tmp_path):
    run = trained(**learning)
    assert run.is_finished and {path.name for path in run.final.iterdir()} == ADAPTER
    before, after = load_model(folders.stock).state_dict(), load_model(run.final).state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert any(after[name].any() for name in set(after) - set(before))
    for merge in (False, True):
        output = export(ExportConfig(run=str(run.folder), output=str(tmp_path / f"merge_{merge}"), merge=merge))
        assert (output / "model.safetensors").exists() == merge
        assert (output / "dmc_gates.safetensors").exists() != merge
        assert torch.equal(logits(output), logits(run.final))


@pytest.mark.parametrize("learning", [LEARNED, FITTED])
def test_merging_takes_the_gates_of_a_finished_run_as_they_were_calibrated(learning, trained, tmp_path, monkeypatch):
    run = trained(**learning)
    for name in ("calibrate_offset", "score_text"):  # on another machine they may come to something else
        monkeypatch.setattr(f"dmc.training.export.{name}", None)
    output = export(ExportConfig(run=str(run.folder), output=str(tmp_path / "merged"), merge=True))
    assert torch.equal(logits(output), logits(run.final)) and not (output / "dmc_gates.safetensors").exists()
    first, second = (json.loads((folder / "retrofit.json").read_text()) for folder in (run.final, output))
    assert first["metrics"] == second["metrics"] and first["compression"] == second["compression"]
    with pytest.raises(TypeError, match="not callable"):
        export(ExportConfig(run=str(run.folder), output=str(tmp_path / "other"), merge=True, target_ratio=1.5))


def test_the_base_of_a_run_is_never_replaced_by_its_export(trained, folders):
    run = trained(**FITTED)
    names = [path.name for path in folders.stock.iterdir()]
    (folders.stock / "files.json").write_text(json.dumps(names))  # as an export has it, which may be replaced
    for merge in (False, True):
        with pytest.raises(FileExistsError, match=rf"is or holds {folders.stock}, which is the input"):
            export(ExportConfig(run=str(run.folder), output=str(folders.stock), overwrite=True, merge=merge))


def test_training_goes_on_from_an_adapter_on_the_same_base(trained, folders):
    first = trained(**LEARNED)
    second = trained("second", first.final, **LEARNED, learning_rate=0.1)
    assert base_of(second.final) == base_of(first.final) == folders.stock
    assert {path.name for path in second.final.iterdir()} == ADAPTER
    assert not torch.equal(logits(second.final), logits(first.final))
    whole = trained("third", first.final, stages=LEARNED["stages"])
    assert (whole.final / "model.safetensors").exists() and not (whole.final / "dmc_gates.safetensors").exists()


@pytest.mark.parametrize(
    ("compression", "training"),
    [(GATES | {"gate_input": "both"}, LEARNED), (GATES, {"stages": LEARNED["stages"]})],
)
def test_a_run_that_changes_its_base_writes_the_whole_model(compression, training, trained):
    final = trained(compression=compression, **training).final
    assert (final / "model.safetensors").exists() and not (final / "dmc_gates.safetensors").exists()


def test_an_adapter_is_uploaded_as_it_is_and_replaces_a_whole_model(hub, trained, caplog):
    final = trained(**FITTED).final
    hub.files["me/gates"], hub.private["me/gates"] = {"model.safetensors": b"before", "thesis.txt": b"mine"}, True
    push(final, "me/gates")
    assert "final holds gates alone, and their base" in caplog.text
    assert {*hub.files["me/gates"]} == ADAPTER | {"thesis.txt"}
    assert hub.files["me/gates"]["dmc_gates.safetensors"] == (final / "dmc_gates.safetensors").read_bytes()


def test_a_run_resumes_from_checkpoints_of_gates_and_their_moments(trained, folders, tmp_path, monkeypatch):
    settings = LEARNED | {"stages": {"retrofit": {"length": "3 steps"}}}
    whole = trained("whole", **settings)
    monkeypatch.setattr("dmc.training.run.Exporter.write", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trained("cut", **settings)
    monkeypatch.undo()
    last, _ = saved_checkpoints(tmp_path / "cut" / "checkpoints")
    added = {f"model.{name}" for name in load_file(whole.final / "dmc_gates.safetensors")}
    stored = set(stored_tensors(last))
    assert {name for name in stored if name.startswith("model.")} == added
    assert {name.rpartition(".")[0].replace("optimizer.", "model.", 1) for name in stored - added} <= added
    shutil.rmtree(last)
    assert torch.equal(logits(trained("cut", **settings).final), logits(whole.final))
    make_other(folders.stock)
    with pytest.raises(ValueError, match="put back that base"):
        load_checkpoint_model(last)


def make_other(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.slow
def test_ranks_that_hold_parts_go_on_from_an_adapter(trained, run_values, folders, tmp_path):
    first, settings = trained(**LEARNED).final, LEARNED | {"learning_rate": 0.1, "batch_size": 2, "micro_batch_size": 1}
    alone = trained("alone", first, **settings)
    run_values |= {"model": str(first), "compression": GATES, "output_dir": str(tmp_path / "two")}
    run_values["training"] |= {"validate_every_steps": 9, **settings}
    run_values["trainer"] |= {"devices": 2, "strategy": "fsdp2"}
    train_ranks(run_values, 2, tmp_path / "log")
    final = tmp_path / "two" / "final"
    assert {path.name for path in final.iterdir()} == ADAPTER and base_of(final) == folders.stock
    assert torch.allclose(logits(final), logits(alone.final), atol=1e-4)
