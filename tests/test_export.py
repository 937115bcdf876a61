import json

import pytest
import torch

import dmc.export
from dmc import load_model
from dmc.export import ModelCard, export

CARD = ModelCard("tiny", "base", "made-up text", {"loss": 1.25})


def test_exported_folder_holds_only_safe_files_and_the_same_model(make_compressed, tmp_path):
    model = make_compressed(gates={"delay": 2})
    folder = export(model, tmp_path / "out", tokenizer=None, card=CARD)
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors", ".md"}
    reloaded = load_model(folder)
    assert reloaded.compression == model.compression
    for name, value in model.state_dict().items():
        assert torch.equal(value, reloaded.state_dict()[name]), name
    card = (folder / "README.md").read_text()
    assert "| loss | 1.2500 |" in card
    assert "action merge" in card
    assert json.loads((folder / "retrofit.json").read_text())["metrics"] == {"loss": 1.25}


def test_folder_with_content_is_refused_and_left_alone(make_compressed, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="is not empty"):
        export(make_compressed(), folder, tokenizer=None, card=CARD)
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_overwrite_replaces_only_after_the_comparison(make_compressed, tmp_path, monkeypatch):
    folder = export(make_compressed(seed=0), tmp_path / "out", tokenizer=None, card=CARD)
    before = (folder / "model.safetensors").read_bytes()
    other = make_compressed(seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(dmc.export, "load_model", lambda *args, **kwargs: make_compressed(seed=2))
        with pytest.raises(RuntimeError, match="gives other logits"):
            export(other, folder, tokenizer=None, card=CARD, overwrite=True)
    assert (folder / "model.safetensors").read_bytes() == before
    export(other, folder, tokenizer=None, card=CARD, overwrite=True)
    assert (folder / "model.safetensors").read_bytes() != before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
