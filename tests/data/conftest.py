"""A small tokenizer and a small corpus shared by the data tests."""

import pytest

from dmc.data import train_tokenizer

WORDS = "the cache holds every key and value of the sequence until it is merged or dropped by the policy".split()


def make_text(number):
    """Return document `number`: a few dozen words, different for every number."""
    words = [WORDS[(number * 7 + place * place) % len(WORDS)] for place in range(20 + 13 * number % 50)]
    return f"document {number}\n" + " ".join(words) + "\n"


@pytest.fixture(autouse=True)
def _without_network(monkeypatch):
    """Keep load_dataset from reporting each first use of a file format to the hub (seconds of waiting offline)."""
    monkeypatch.setattr("datasets.config.HF_UPDATE_DOWNLOAD_COUNTS", False)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return train_tokenizer(map(make_text, range(40)), 300, tmp_path_factory.mktemp("tokenizer") / "bpe")


@pytest.fixture
def corpus(tmp_path):
    """Return a folder of 40 text files."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:03}.txt").write_text(make_text(number))
    return folder
