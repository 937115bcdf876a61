"""Prose of what is installed: each document once, in one split, in three forms."""

import sysconfig

import pytest

from dmc.data import ChainSource, ListSource, ProseSource
from dmc.data.lists import FORMS, nouns
from dmc.data.prose import _documents, fingerprint, split_of_text

SPLITS = ("train", "validation", "calibration", "test")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A machine with one package, with its licence, one module, and a folder of manuals."""
    root = tmp_path / "site"
    info = root / "spam-1.0.dist-info"
    info.mkdir(parents=True)
    (root / "spam.py").write_text(
        f'def fry(\n    egg=1,\n):\n    """Fry an egg.\n\n    {"It takes a while. " * 20}\n    """\n'
    )
    ours = root / "dmc_retrofit-0.1.dist-info"
    ours.mkdir()
    (ours / "METADATA").write_text(f"Name: dmc-retrofit\n\n{'Our own page changes. ' * 30}\n")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: spam\nVersion: 1.0\n\n{'Spam is a package. ' * 30}\n")
    (info / "LICENSE").write_text(f"Copyright 2020 A\n\n{'You may use it. ' * 30}\n")
    (info / "RECORD").write_text("spam-1.0.dist-info/METADATA,,\nspam-1.0.dist-info/LICENSE,,\nspam.py,,\n")
    paths = {**sysconfig.get_paths(), "purelib": str(root)}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    monkeypatch.setattr(ProseSource, "_code", lambda self: (("test", root / "spam.py"),))
    folder = tmp_path / "manuals"
    folder.mkdir()
    (folder / "copy.txt").write_text(f"copyright 2021 B\n\n{'You may  use it. ' * 30}\n")
    (folder / "page.html").write_text(f"<head>x</head><p>A &lt;page&gt; of a book.</p><p>{'It is long. ' * 200}</p>")
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"{number} green bottles. " * 200)
    _documents.cache_clear()
    yield folder
    _documents.cache_clear()


def read(folder, **options):
    source = ProseSource(folders=[f"{folder}/*"], **options)
    return list(source.read(source.stream()))


def test_each_document_is_in_one_split_and_there_once(installed):
    found = {split: read(installed, split=split) for split in SPLITS}
    texts = [text for split in SPLITS for text in found[split]]
    docstring = next(text for text in texts if text.startswith("Fry an egg.\n\nIt takes"))
    assert docstring in found["test"] and split_of_text(docstring) != "test"  # the split of its file
    assert all(found.values()) and all(
        split_of_text(text) == split for split in SPLITS for text in found[split] if text != docstring
    )
    assert len({fingerprint(text) for text in texts}) == len(texts) == 60 + 4  # one of both licences
    assert sum(text.startswith("Fry an egg.\n\nIt takes") for text in texts) == 1
    assert sum(text.startswith("Spam is a package") for text in texts) == 1
    assert sum(text.startswith("A <page> of a book.") for text in texts) == 1


def test_repeated_passages_are_said_twice(installed):
    for text in read(installed, form="repeated"):
        parts = text.split("\n\n")
        assert len(parts) in (2, 3) and parts[0] == parts[-1] and len(parts[0]) > 300


def test_chats_ask_about_docstrings_and_for_passages(installed):
    chats = [chat for split in SPLITS for chat in read(installed, split=split, form="chats")]
    assert all([turn["role"] for turn in chat] == ["user", "assistant"] * (len(chat) // 2) for chat in chats)
    (about,) = [chat for chat in chats if "fry" in chat[0]["content"]]
    assert about[1]["content"].startswith("Fry an egg.")
    copied = [chat for chat in chats if len(chat) == 4]
    assert copied and all(chat[0]["content"].endswith(f"\n\n{chat[3]['content']}") for chat in copied)
    assert ProseSource(form="chats").has_loss_mask and not ProseSource().has_loss_mask


def test_the_same_files_give_the_same_documents(installed):
    assert read(installed, form="chats") == read(installed, form="chats")
    first, second = (ProseSource(folders=[f"{installed}/*"], seed=seed).description() for seed in (0, 1))
    assert first != second


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match="form='verse' is unknown"):
        ProseSource(form="verse")
    with pytest.raises(ValueError, match="expected a list"):
        ProseSource(folders="/usr/share/doc")
    with pytest.raises(ValueError, match="split='dev'"):
        ListSource(split="dev")
    with pytest.raises(ValueError, match="at least 1 and 4"):
        ListSource(longest=3)


def test_lists_say_rows_again_and_splits_share_none():
    source = ListSource(lists=40)
    texts = list(source.read(source.stream()))
    assert texts == [source.draw(number)[0] for number in range(40)] and len({*texts}) == 40
    assert not {*texts} & {*(ListSource(split="test", lists=40).draw(number)[0] for number in range(40))}
    assert len(nouns()) > 500 and "tomato" in nouns()
    rows = [("tomato", "12"), ("blue snail", "rome")]
    for form in FORMS:
        text = form(rows).lower().replace("_", " ")
        assert all(part in text for row in rows for part in row)


def test_the_hash_by_which_an_unfinished_run_knows_its_text_stays():
    assert ListSource().digest() == "eb06dae15b9acb0d9b78e33d2a04ede4a728a661f0fc6c54bd46cd6b3633c152"
    assert ChainSource().digest() == "17e4a18256f9c5c30afc0f8bf0cac1e03dd4ec12f3bc25d09e7482e03a8cfd33"
