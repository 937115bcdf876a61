import json
import shutil

import pytest
import torch
from launching import logged_losses
from transformers import AutoTokenizer, GenerationConfig

import dmc.training.export
from dmc import load_model
from dmc.config import build_config
from dmc.training.config import RunConfig
from dmc.training.export import export, export_checkpoint
from dmc.training.model_folder import ModelCard, check_push, push
from dmc.training.run import train
from dmc.training.text_data import build_tokenizer

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


REFUSED = {"do_sample": False, "temperature": 0.9, "eos_token_id": [3, 5], "repetition_penalty": 1.1}
"""Settings that transformers loads, and refuses to save."""


def test_generation_settings_are_exported_as_the_base_has_them(make_compressed, tmp_path):
    model = make_compressed()
    model.generation_config = GenerationConfig(**REFUSED)
    folder = export(model, tmp_path / "out", tokenizer=None, card=CARD)
    found = json.loads((folder / "generation_config.json").read_text())
    assert {name: found[name] for name in REFUSED} == REFUSED
    assert model.generation_config.eos_token_id == [3, 5]


@pytest.mark.parametrize(("ends", "expected"), [(5, [5, 0]), ([5, 3], [5, 3, 0]), (0, 0), (None, None)])
def test_what_ends_the_tokenizers_texts_ends_generations_that_end(ends, expected, folders):
    model, tokenizer = load_model(folders.compressed), AutoTokenizer.from_pretrained(folders.compressed)
    model.generation_config = GenerationConfig(eos_token_id=ends)
    folder = export(model, folders.text.with_name("out"), tokenizer=tokenizer, card=CARD)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == expected


def test_an_export_that_fails_leaves_nothing_beside_it(make_compressed, tmp_path, monkeypatch):
    monkeypatch.setattr(
        dmc.training.export, "describe", lambda *_: (_ for _ in ()).throw(OSError("no space left on device"))
    )
    with pytest.raises(OSError, match="no space left"):
        export(make_compressed(), tmp_path / "out", tokenizer=None, card=CARD)
    assert list(tmp_path.iterdir()) == []


def test_overwrite_replaces_only_after_the_comparison(make_compressed, tmp_path, monkeypatch):
    folder = export(make_compressed(seed=0), tmp_path / "out", tokenizer=None, card=CARD)
    before = (folder / "model.safetensors").read_bytes()
    other = make_compressed(seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(dmc.training.export, "load_model", lambda *args, **kwargs: make_compressed(seed=2))
        with pytest.raises(RuntimeError, match="gives other logits"):
            export(other, folder, tokenizer=None, card=CARD, overwrite=True)
    assert (folder / "model.safetensors").read_bytes() == before
    export(other, folder, tokenizer=None, card=CARD, overwrite=True)
    assert (folder / "model.safetensors").read_bytes() != before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_is_uploaded_once_and_replaces_the_weights_before_it(hub, make_compressed, tmp_path):
    card = ModelCard("tiny", "meta-llama/Llama-2-7b-hf", "text", {"achieved_ratio": 3.9}, "me/tiny-cr4")
    folder = export(make_compressed(gates={"delay": 2}), tmp_path / "final", tokenizer=None, card=card)
    check_push("me/tiny-cr4")
    assert hub.files == {}
    assert push(folder, "me/tiny-cr4") == f"{hub.url}/me/tiny-cr4/commit/{hub.commit}"
    files = hub.files["me/tiny-cr4"]
    assert hub.private == {"me/tiny-cr4": True}
    assert files == {path.name: path.read_bytes() for path in folder.iterdir()}
    said = files["README.md"].decode()
    assert "\nbase_model: meta-llama/Llama-2-7b-hf\n---\n" in said and 'from_pretrained("me/tiny-cr4")' in said
    assert "method: tokens are merged (DMC, arXiv:2403.09636), after 2 tokens" in said
    assert "compression ratio: target 4, achieved 3.90 on held-out text" in said
    push(folder, "me/tiny-cr4")
    assert hub.commits == 1
    files["model-00001-of-00002.safetensors"] = files["thesis.txt"] = b"another"
    push(export(make_compressed(seed=1), tmp_path / "other", tokenizer=None, card=card), "me/tiny-cr4")
    assert hub.commits == 2 and "thesis.txt" in files and "model-00001-of-00002.safetensors" not in files


def test_a_failed_upload_leaves_the_folder_and_says_how_to_go_on(hub, make_compressed, tmp_path):
    folder = export(make_compressed(), tmp_path / "final", tokenizer=None, card=CARD)
    hub.fails = 403, {"error": "Forbidden"}
    with pytest.raises(OSError, match=r"final is exported but could not be uploaded \(.*403.*: `hf upload me/tiny"):
        push(folder, "me/tiny")
    assert load_model(folder).compression.target_ratio == 4


def test_an_upload_that_cannot_succeed_is_refused_without_asking_the_hub(hub, monkeypatch):
    hub.fails = 500, {}
    with pytest.raises(ValueError, match="push_to_hub=a/b/c: Repo id must be"):
        check_push("a/b/c")
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(ValueError, match="push_to_hub=me/tiny: HF_HUB_OFFLINE is set"):
            check_push("me/tiny")
    monkeypatch.setattr("dmc.training.model_folder.get_token", lambda: None)
    with pytest.raises(ValueError, match="push_to_hub=me/tiny: no Hugging Face token was found: log in with `hf auth"):
        check_push("me/tiny")


def test_training_goes_on_after_a_snapshot_as_without_one(run_values, tmp_path):
    run_values["training"] |= {"stages": {"retrofit": {"length": "6 steps"}}, "learning_rate": 3e-2}
    losses = []
    for ratios in ([], [2.0]):
        run_values["training"]["snapshot_ratios"] = ratios
        run_values["output_dir"] = str(tmp_path / f"snapshots{len(ratios)}")
        losses.append(logged_losses(train(build_config(RunConfig, run_values)).folder))
    assert (tmp_path / "snapshots1" / "snapshots" / "cr2" / "config.json").is_file()
    assert losses[0] == losses[1]


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_tokenizer_that_has_changed_since_the_run_is_not_exported(is_trained, run_values, corpus, tmp_path):
    shutil.copytree(corpus / "train", tmp_path / "text")
    run_values["data"]["train"]["text"]["name"] = str(tmp_path / "text")
    run_values["data"]["tokenizer"]["folder"] = str(folder := tmp_path / "tokenizer")
    if not is_trained:
        build_tokenizer(build_config(RunConfig, run_values))
        run_values["data"]["tokenizer"] = {"path": str(folder)}
    run_values["training"]["stages"] = {"retrofit": {"length": "1 steps"}}
    run = train(build_config(RunConfig, run_values))
    content = (folder / "tokenizer.json").read_text()
    changed = tmp_path / "text" / "000.txt" if is_trained else folder / "tokenizer.json"
    plain = changed.read_text()
    changed.write_text(plain.replace("line", "verse") if is_trained else plain.replace("a", "b"))
    name = "data.train.text" if is_trained else "data.tokenizer"
    with pytest.raises(ValueError, match=rf"^{name} has changed since the run in {run.folder} began"):
        export_checkpoint(run.folder, tmp_path / "out")
    assert not (tmp_path / "out").exists() and (not is_trained or (folder / "tokenizer.json").read_text() == content)
    changed.write_text(plain)
    exported = export_checkpoint(run.folder, tmp_path / "out")
    assert (exported / "tokenizer.json").read_text() == (run.final / "tokenizer.json").read_text()
