import json
from pathlib import Path

import pytest
import torch

import dmc.training.export
from dmc import load_model
from dmc.files import RECORD_NAME, replacement
from dmc.training.export import ModelCard, check_push, export, push

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


def add_thesis(folder):
    (folder / "thesis.txt").write_text("years of work")


def add_thesis_below(folder):
    (folder / "chapters" / "one").mkdir(parents=True)
    add_thesis(folder / "chapters" / "one")


def train_on_in_place(folder):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)  # as many bytes as before


def link_to_elsewhere(folder):
    (folder / "data").symlink_to(folder.parent)


def link_instead_of_file(folder):
    (folder / "README.md").rename(folder.parent / "notes.md")
    (folder / "README.md").symlink_to(folder.parent / "notes.md")


def forget_the_record(folder):
    (folder / "files.json").unlink(missing_ok=True)


def list_no_files(folder):
    (folder / "files.json").write_text("[]")


@pytest.mark.parametrize(
    "change",
    [
        add_thesis, add_thesis_below, train_on_in_place, link_to_elsewhere, link_instead_of_file, forget_the_record,
        list_no_files,
    ],
)  # fmt: skip
@pytest.mark.parametrize("through_a_link", [False, True])
def test_overwrite_replaces_nothing_but_an_export(change, through_a_link, make_compressed, tmp_path):
    folder = export(make_compressed(seed=0), tmp_path / "place" / "out", tokenizer=None, card=CARD)
    change(folder)
    before = {path: path.read_bytes() for path in folder.parent.rglob("*") if path.is_file()}
    output = folder
    if through_a_link:
        output = tmp_path / "link"
        output.symlink_to(folder)
    with pytest.raises(FileExistsError, match="is not replaced: give another output, or remove it by hand"):
        export(make_compressed(seed=1), output, tokenizer=None, card=CARD, overwrite=True)
    assert {path: path.read_bytes() for path in folder.parent.rglob("*") if path.is_file()} == before


def test_what_lies_where_an_export_is_written_aside_is_left_alone(make_compressed, tmp_path):
    for kind in ("partial", "retired"):
        place = tmp_path / f".{kind}.{kind}"
        place.mkdir()
        add_thesis(place)
        with pytest.raises(FileExistsError, match="is in the way"):
            export(make_compressed(), tmp_path / kind, tokenizer=None, card=CARD, overwrite=True)
        assert (place / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("kind", ["partial", "retired"])
def test_a_link_where_an_export_is_written_aside_leads_to_no_delete(kind, make_compressed, tmp_path):
    other = export(make_compressed(seed=0), tmp_path / "other", tokenizer=None, card=CARD)
    (tmp_path / f".out.{kind}").symlink_to(other)
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    with pytest.raises(FileExistsError, match="is in the way"):
        export(make_compressed(), tmp_path / "out", tokenizer=None, card=CARD, overwrite=True)
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before


def test_an_export_that_fails_leaves_nothing_beside_it(make_compressed, tmp_path, monkeypatch):
    monkeypatch.setattr(
        dmc.training.export, "describe", lambda *_: (_ for _ in ()).throw(OSError("no space left on device"))
    )
    with pytest.raises(OSError, match="no space left"):
        export(make_compressed(), tmp_path / "out", tokenizer=None, card=CARD)
    assert list(tmp_path.iterdir()) == []


def test_a_linked_output_is_replaced_where_it_lies(make_compressed, tmp_path):
    folder = export(make_compressed(seed=0), tmp_path / "place" / "out", tokenizer=None, card=CARD)
    before = (folder / "model.safetensors").read_bytes()
    (tmp_path / "link").symlink_to(folder)
    export(make_compressed(seed=1), tmp_path / "link", tokenizer=None, card=CARD, overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert (folder / "model.safetensors").read_bytes() != before


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


def test_what_a_kill_leaves_of_a_removal_is_known_as_ours(tmp_path, monkeypatch):
    model_folder, partial = tmp_path / "model", tmp_path / ".model.partial"
    with replacement(model_folder, overwrite=False) as aside:
        (aside / "weights").write_text("1")
    partial.mkdir()
    for name in ("a", RECORD_NAME, "z"):
        (partial / name).write_text("{}")

    def killed(self, **_):
        removed.append(self.name)
        raise KeyboardInterrupt

    removed = []
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt), replacement(model_folder, overwrite=True):
            raise AssertionError
    assert removed and RECORD_NAME not in removed
    with replacement(model_folder, overwrite=True) as aside:
        (aside / "weights").write_text("2")
    assert (model_folder / "weights").read_text() == "2" and not partial.exists()


def write_model(folder, text):
    with replacement(folder, overwrite=True) as aside:
        (aside / "weights").write_text(text)


def test_a_folder_that_cannot_take_its_name_leaves_the_earlier_one(tmp_path, monkeypatch):
    write_model(tmp_path / "model", "1")
    plain = Path.rename

    def rename(self, target):
        if self.name == ".model.partial":
            raise OSError("no such device")
        return plain(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(OSError, match="no such device"):
            write_model(tmp_path / "model", "2")
    assert (tmp_path / "model" / "weights").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_was_put_aside_when_a_kill_came_gets_its_name_back(tmp_path):
    write_model(tmp_path / "model", "1")
    write_model(tmp_path / ".model.partial", "2")
    (tmp_path / "model").rename(tmp_path / ".model.retired")
    with pytest.raises(ZeroDivisionError), replacement(tmp_path / "model", overwrite=True):
        print(1 // 0)
    assert (tmp_path / "model" / "weights").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_a_finished_replacement_left_aside_does_not_come_back(tmp_path):
    write_model(tmp_path / ".model.retired", "1")  # killed while it was removed; its user then removed the model
    (tmp_path / ".model.retired" / "weights").unlink()
    with pytest.raises(ZeroDivisionError), replacement(tmp_path / "model", overwrite=False):
        print(1 // 0)
    assert list(tmp_path.iterdir()) == []
    write_model(tmp_path / "model", "2")
    assert (tmp_path / "model" / "weights").read_text() == "2"


def test_a_folder_is_uploaded_whole_once_and_replaces_the_weights_before_it(hub, make_compressed, tmp_path):
    card = ModelCard("tiny", "meta-llama/Llama-2-7b-hf", "text", {"achieved_ratio": 3.9}, "me/tiny-cr4")
    folder = export(make_compressed(gates={"delay": 2}), tmp_path / "final", tokenizer=None, card=card)
    check_push("me/tiny-cr4")
    assert hub.files == {}
    assert push(folder, "me/tiny-cr4") == f"{hub.url}/me/tiny-cr4/commit/{1:040}"
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
    monkeypatch.setattr(dmc.training.export, "get_token", lambda: None)
    with pytest.raises(ValueError, match="push_to_hub=me/tiny: there is no token of the hub: log in with `hf auth"):
        check_push("me/tiny")
