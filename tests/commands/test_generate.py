"""The command that continues a prompt: contexts that are read, saved and gone on from."""

import pytest
from composing import CONFIGS

from dmc.commands.generate import GenerateConfig, generate
from dmc.ranks import Ranks
from dmc.runtime.carried_cache import DESCRIPTION_NAME
from dmc.serving.config import make_worker, read_config

POLICY = {"_target_": "dmc.policies.AttentionMatching", "instruction": [5, 9]}


@pytest.mark.parametrize("kind", ["compressed", "stock"])
def test_a_context_is_read_once_and_answers_from_its_folder_as_from_its_file(kind, folders, tmp_path, capsys):
    method = {"policy": POLICY, "budget": 4} if kind == "stock" else {}
    asked = {"model": str(getattr(folders, kind)), "max_new_tokens": 4, **method}
    saved = tmp_path / "carried"

    def said(**given):
        generate(GenerateConfig(**asked, **given))
        return capsys.readouterr()

    read = said(context=str(folders.text), save=str(saved))
    assert read.out == "" and "tokens, CR" in read.err and (saved / DESCRIPTION_NAME).is_file()
    from_file, from_folder = (said(prompt="line 3", context=str(context)).out for context in (folders.text, saved))
    assert from_file == from_folder and from_file.startswith("line 3") and from_file != said(prompt="line 3").out
    with pytest.raises(FileExistsError, match="carried is not empty"):
        said(context=str(folders.text), save=str(saved))
    assert said(context=str(folders.text), save=str(saved), overwrite=True).out == ""


def test_a_context_that_is_no_text_is_named_before_the_model_is_loaded(tmp_path):
    (tmp_path / "notes.txt").write_bytes(b"\x89PNG\xff")
    with pytest.raises(ValueError, match=r"context=.*notes.txt is no text in UTF-8"):
        generate(GenerateConfig(model="nowhere", context=str(tmp_path / "notes.txt")))


def test_a_policy_whose_cache_cannot_be_saved_is_refused_before_the_model_is_loaded(folders, tmp_path):
    method = {"policy": {"_target_": "dmc.policies.InfLLM"}, "budget": 2, "save": str(tmp_path / "out")}
    with pytest.raises(ValueError, match="policy=InfLLM: it keeps a part of its state outside the pages; use another"):
        generate(GenerateConfig(model="nowhere", context=str(folders.text), **method))


def test_ranks_load_their_parts_of_the_revision_that_was_asked_for(monkeypatch):
    asked = []

    def local_folder(name, revision=None):
        asked.append((name, revision))
        raise FileNotFoundError

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr("dmc.ranks.Ranks.init_process_group", Ranks)
    monkeypatch.setattr("dmc.models.tensor_parallel.local_folder", local_folder)
    with pytest.raises(FileNotFoundError):
        generate(GenerateConfig(model="me/tiny", revision="v2", prompt="a"))
    with pytest.raises(ValueError, match="dtype='floaty': expected auto, or a torch dtype"):
        generate(GenerateConfig(model="me/tiny", dtype="floaty", prompt="a"))
    with pytest.raises(FileNotFoundError):
        make_worker(read_config({"models": {"own": {"path": "me/tiny", "revision": "v3"}}}), CONFIGS / "policy")
    assert asked == [("me/tiny", "v2"), ("me/tiny", "v3")]


def test_a_model_without_a_chat_template_is_refused_before_it_is_loaded(folders, monkeypatch):
    monkeypatch.setattr("dmc.commands.generate._load", lambda config: pytest.fail("loaded"))
    with pytest.raises(ValueError, match="chat=true: the model has no chat template"):
        generate(GenerateConfig(model=str(folders.stock), prompt="a", chat=True))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, ValueError, "give a prompt to continue, or a context to read"),
        ({"prompt": "a", "save": "folder"}, ValueError, "save=folder keeps the cache of a context: give context=FILE"),
        ({"context": "nowhere.txt"}, FileNotFoundError, "context=nowhere.txt: expected a text file, or the folder of"),
    ],
)
def test_what_cannot_be_read_is_refused_at_once(given, error, message):
    with pytest.raises(error, match=message):
        GenerateConfig(model="nowhere", **given)
