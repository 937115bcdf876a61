"""The command that continues a prompt: contexts that are read, saved and gone on from."""

import pytest

from dmc.commands.generate import GenerateConfig, generate
from dmc.runtime.carried_cache import DESCRIPTION_NAME

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
