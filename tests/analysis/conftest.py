"""A tiny stock model and its compressed twin as folders with a tokenizer, and a text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dmc.data import train_tokenizer

VOCAB_SIZE = 300


@dataclass(frozen=True)
class Folders:
    """Where they lie."""

    stock: Path
    compressed: Path
    text: Path


@pytest.fixture
def folders(make_stock: Any, make_compressed: Any, tmp_path: Path) -> Folders:
    found = Folders(tmp_path / "stock", tmp_path / "compressed", tmp_path / "text.txt")
    found.text.write_text("".join(f"line {i} <b>é\u00a0& {'x' * (i % 7)}</b>\n" for i in range(60)))
    tokenizer = train_tokenizer([found.text.read_text()], VOCAB_SIZE, tmp_path / "tokenizer")
    for folder, build in ((found.stock, make_stock), (found.compressed, make_compressed)):
        build(vocab_size=VOCAB_SIZE).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return found
