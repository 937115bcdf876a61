"""Evaluation begins a text as training begins a document, and never puts a text's beginning or end inside one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from dmc import Engine, load_model
from dmc.data import TextSource, framing_of
from dmc.results.harness import EngineLM
from dmc.results.tasks import TextLoss
from dmc.results.tasks.prompts import Encoder


@pytest.fixture
def tokenizer(folders: Any) -> Any:
    """One that puts a token of its own before a text, as Llama's do; the model has room for it."""
    found = copy.deepcopy(AutoTokenizer.from_pretrained(folders.stock))
    backend = found.backend_tokenizer
    rarest = next(token for token, token_id in found.get_vocab().items() if token_id == 255)
    found.bos_token = rarest
    found.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{rarest} $A", pair=f"{rarest} $A {rarest} $B", special_tokens=[(rarest, backend.token_to_id(rarest))]
    )
    return found


def test_the_harness_begins_a_text_as_training_begins_a_document(tokenizer: Any, folders: Any) -> None:
    adapter = EngineLM(Engine(load_model(folders.stock), tokenizer))
    framing = framing_of(tokenizer)
    assert framing.begin == (tokenizer.bos_token_id,)
    text = tokenizer("alpha beta", add_special_tokens=False)["input_ids"]
    assert adapter.tok_encode("alpha beta") == [*framing.begin, *text]
    assert (adapter.prefix_token_id,) == framing.begin
    assert adapter.eot_token_id == framing.end


def test_a_window_that_begins_with_a_document_has_its_beginning_once(
    tokenizer: Any, folders: Any, tmp_path: Path
) -> None:
    task = TextLoss(TextSource(str(folders.text)), 4, 16, 8, cache_folder=str(tmp_path))
    begin = list(framing_of(tokenizer).begin)
    first, *others = task.samples(tokenizer, 300)
    assert first.prompt[:1] == begin and begin[0] not in first.prompt[1:] + first.continuation
    assert all(sample.prompt[:1] == begin for sample in others)
    flat = tokenizer(folders.text.read_text(), add_special_tokens=False)["input_ids"]
    assert first.prompt[1:] + first.continuation == flat[: len(first.prompt) - 1 + 8]


def test_filler_has_neither_beginnings_nor_ends_of_texts_inside(tokenizer: Any, tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02d}.txt").write_text("alpha beta gamma")
    (windows,) = Encoder(tokenizer).filler(TextSource(str(tmp_path / "*.txt")), 40, 1, str(tmp_path / "cache"))
    framing = framing_of(tokenizer)
    assert len(windows) == 40 and not {*framing.begin, framing.end} & set(windows)
