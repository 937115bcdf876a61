import copy
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dmc.data import tokenizer as tokenizer_module
from dmc.data import train_tokenizer
from dmc.data.encoding import encode_documents
from dmc.data.tokenizer import END_OF_TEXT, Framing, framing_of, tokenizer_digest
from dmc.training.export import export
from dmc.training.model_folder import ModelCard

TEXTS = ["the cache holds every key", "and value of the sequence", "until it is merged", ""] * 3
STRANGE = "Zürich → 東京 🙂\r\n\tx  = 1\n\n\n  \x00 \ufffd end "


def names(folder):
    """Name what lies in a folder but for locks."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def digest_of(tokenizer):
    """Hash a tokenizer with its own framing."""
    return tokenizer_digest(tokenizer, framing_of(tokenizer))


def test_saved_folder_loads_with_auto_tokenizer(tmp_path):
    trained = train_tokenizer(TEXTS, 300, tmp_path / "bpe")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "bpe")
    assert len(trained) == len(loaded) == 300
    assert loaded.eos_token == loaded.pad_token == END_OF_TEXT
    assert loaded.eos_token_id == 0 and framing_of(loaded) == Framing((), 0)
    assert loaded(TEXTS)["input_ids"] == trained(TEXTS)["input_ids"]
    assert digest_of(loaded) == digest_of(trained)
    assert names(tmp_path) == ["bpe"]


def test_any_text_comes_back(tokenizer):
    for text in (*TEXTS, STRANGE):
        (token_ids,) = encode_documents(tokenizer, [text])
        assert tokenizer.decode(token_ids) == text
        assert tokenizer.eos_token_id not in token_ids


def test_training_twice_gives_the_same_files(tmp_path):
    for name in ("first", "second"):
        train_tokenizer(TEXTS, 290, tmp_path / name)
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes(), path.name


@pytest.mark.slow
def test_training_is_deterministic_across_processes(tmp_path):
    train_tokenizer(TEXTS, 290, tmp_path / "here")
    script = "import json, sys, dmc.data; dmc.data.train_tokenizer(json.loads(sys.argv[1]), 290, sys.argv[2])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, "-c", script, json.dumps(TEXTS), str(tmp_path / "there")]
    subprocess.run(arguments, check=True, env=environment)
    for path in (tmp_path / "here").iterdir():
        assert path.read_bytes() == (tmp_path / "there" / path.name).read_bytes(), path.name


def test_folder_is_reused_for_the_same_texts_and_size_only(tmp_path, monkeypatch, caplog):
    from dmc.data import tokenizer as module

    num_trained = []
    train = module._train
    monkeypatch.setattr(module, "_train", lambda *arguments: num_trained.append(1) or train(*arguments))
    folder = tmp_path / "bpe"
    first = train_tokenizer(iter(TEXTS), 300, folder)
    assert train_tokenizer(TEXTS, 300, folder).get_vocab() == first.get_vocab()
    assert len(num_trained) == 1 and not caplog.records
    assert len(train_tokenizer(TEXTS, 280, folder)) == 280
    train_tokenizer(["".join(TEXTS)], 280, folder)
    assert len(num_trained) == 3 and len(caplog.records) == 2


def test_digest_follows_what_changes_the_ids(tokenizer, tmp_path):
    same, other_separator = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
    same(["a", "a b c d"], padding=True, truncation=True, max_length=3)
    other_separator.eos_token = "a"
    assert digest_of(same) == digest_of(tokenizer)
    assert digest_of(other_separator) != digest_of(tokenizer)
    assert digest_of(train_tokenizer(TEXTS, 280, tmp_path / "bpe")) != digest_of(tokenizer)


def test_long_text_is_encoded_in_pieces_without_loss(tokenizer, monkeypatch):
    text = "".join(f"line {number}\n" for number in range(100)) + "x" * 200
    unsplit = encode_documents(tokenizer, [text, "second"])
    monkeypatch.setattr("dmc.data.encoding._MAX_PIECE", 50)
    pieces = encode_documents(tokenizer, [text, "second"])
    assert [tokenizer.decode(token_ids) for token_ids in pieces] == [text, "second"]
    assert pieces[1] == unsplit[1]
    assert encode_documents(tokenizer, []) == []


def test_errors_name_the_value_and_the_remedy(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="vocab_size=256 is below 257"):
        train_tokenizer(TEXTS, 256, tmp_path / "bpe")
    for texts in ([], ["", ""]):
        with pytest.raises(ValueError, match="No text to train a tokenizer on"):
            train_tokenizer(texts, 300, tmp_path / "bpe")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"^data.tokenizer.folder: .* holds files but no files.json, which lists"):
        train_tokenizer(TEXTS, 300, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("vocab_size", [280, 300])
def test_folder_with_other_files_is_neither_used_nor_replaced(vocab_size, tmp_path):
    train_tokenizer(TEXTS, 300, tmp_path / "bpe")
    (tmp_path / "bpe" / "model.safetensors").write_text("weeks of training")
    with pytest.raises(FileExistsError, match=r"holds model.safetensors, which its files.json does not list"):
        train_tokenizer(TEXTS, vocab_size, tmp_path / "bpe")
    assert names(tmp_path) == ["bpe"]


def test_a_model_is_no_place_for_a_tokenizer(make_compressed, tmp_path):
    export(make_compressed(), tmp_path / "final", tokenizer=None, card=ModelCard("tiny", base="none", data="none"))
    before = names(tmp_path / "final")
    with pytest.raises(FileExistsError, match=r"^data.tokenizer.folder: .*final holds no trained_on.json, so it is"):
        train_tokenizer(TEXTS, 300, tmp_path / "final")
    assert names(tmp_path / "final") == before


def test_a_kill_before_the_sources_are_noted_leaves_no_tokenizer_of_other_texts(tmp_path, monkeypatch):
    first, plain = train_tokenizer(TEXTS, 300, tmp_path / "bpe", sources="one"), Path.write_text

    def write_text(self, *values, **named):
        if self.name.endswith(".sources"):
            raise KeyboardInterrupt
        return plain(self, *values, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_text)
        with pytest.raises(KeyboardInterrupt):
            train_tokenizer(["xylophones jump quickly over quartz"] * 9, 300, tmp_path / "bpe", sources="other")
    assert train_tokenizer(TEXTS, 300, tmp_path / "bpe", sources="one").get_vocab() == first.get_vocab()


def test_of_several_that_want_a_tokenizer_one_trains_it(tmp_path, monkeypatch):
    train, trained = tokenizer_module._train, []
    monkeypatch.setattr(tokenizer_module, "_train", lambda *given: trained.append(1) or train(*given))
    with ThreadPoolExecutor(3) as threads:
        found = [
            future.result()
            for future in [threads.submit(train_tokenizer, TEXTS, 300, tmp_path / "t") for _ in range(3)]
        ]
    assert len(trained) == 1 and {len(tokenizer) for tokenizer in found} == {300} and names(tmp_path) == ["t"]
