from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from transformers import AutoTokenizer

from dmc import load_model
from dmc.results.segments import segment_text
from dmc.results.tasks.inside import decisions_of


class Page(HTMLParser):
    """Reads the text of segments back, and notes what a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.in_pre, self.text, self.colors, self.fetched = False, "", [], []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.in_pre |= tag == "pre"
        self.fetched += [value for name, value in attrs if name in ("src", "href")]
        self.colors += [value for name, value in attrs if name == "style"]

    def handle_endtag(self, tag: str) -> None:
        self.in_pre &= tag != "pre"

    def handle_data(self, data: str) -> None:
        self.text += data if self.in_pre else ""


@pytest.mark.parametrize(("layer", "head"), [(0, 0), (1, 1)])
def test_segments_are_a_heads_decisions_and_make_up_the_text(folders: Any, layer: int, head: int) -> None:
    model, tokenizer = load_model(folders.compressed), AutoTokenizer.from_pretrained(folders.compressed)
    text = folders.text.read_text()
    cut = segment_text(model, tokenizer, text, layer, head, 90)
    tokens = tokenizer(text)["input_ids"][:90]
    merged = decisions_of(model, tokens)[layer, head].tolist()
    begins = [position for position, decision in enumerate(merged) if not decision]
    assert [each.begin for each in cut.segments] == begins
    assert [each.end for each in cut.segments] == [*begins[1:], 90]
    assert "".join(each.kept + each.rest for each in cut.segments) == tokenizer.decode(tokens)
    page = Page()
    page.feed(cut.page())
    assert page.text == tokenizer.decode(tokens) and page.fetched == [] and "http" not in cut.page()
    assert all(left != right for left, right in zip(page.colors, page.colors[1:], strict=False))
    assert f"compression ratio {90 / len(begins):.2f}" in cut.page()
    assert len(re.findall('title="segment', cut.page())) == len(begins)


def test_what_cannot_be_cut_is_refused(folders: Any) -> None:
    model, tokenizer = load_model(folders.compressed), AutoTokenizer.from_pretrained(folders.compressed)
    with pytest.raises(ValueError, match="the text to cut into segments is empty"):
        segment_text(model, tokenizer, " \n", 0, 0, 10)
    with pytest.raises(ValueError, match="layer=2, head=0: the model has 2 layers, 2 heads"):
        segment_text(model, tokenizer, "line", 2, 0, 10)
    with pytest.raises(ValueError, match="needs a fast tokenizer"):
        segment_text(model, object(), "line", 0, 0, 10)
