import re
from html.parser import HTMLParser

import pytest
from transformers import AutoTokenizer

from dmc import load_model
from dmc.results.segments import segment_page
from dmc.results.tasks.cache_analysis import decisions_of


class Page(HTMLParser):
    """Reads the text of segments back, and notes what a page would fetch."""

    def __init__(self):
        super().__init__()
        self.in_pre, self.text, self.colors, self.titles, self.fetched = False, "", [], [], []

    def handle_starttag(self, tag, attrs):
        self.in_pre |= tag == "pre"
        self.fetched += [value for name, value in attrs if name in ("src", "href")]
        self.colors += [value for name, value in attrs if name == "style"]
        self.titles += [value for name, value in attrs if name == "title"]

    def handle_endtag(self, tag):
        self.in_pre &= tag != "pre"

    def handle_data(self, data):
        self.text += data if self.in_pre else ""


@pytest.mark.parametrize(("layer", "head"), [(0, 0), (1, 1)])
def test_segments_are_a_heads_decisions_and_make_up_the_text(folders, layer, head):
    model, tokenizer = load_model(folders.compressed), AutoTokenizer.from_pretrained(folders.compressed)
    text = "<b>&" + folders.text.read_text()
    tokens = tokenizer(text)["input_ids"][:90]
    merged = decisions_of(model, tokens)[layer, head].tolist()
    begins = [position for position, decision in enumerate(merged) if not decision]
    html, page = segment_page(model, tokenizer, text, layer, head, 90), Page()
    page.feed(html)
    found = [[int(number) for number in re.findall(r"\d+", title)] for title in page.titles]
    ends = [*begins[1:], 90]
    assert found == [[n, end - begin, begin] for n, (begin, end) in enumerate(zip(begins, ends, strict=True), start=1)]
    assert page.text == tokenizer.decode(tokens) and page.fetched == [] and "http" not in html
    assert all(left != right for left, right in zip(page.colors, page.colors[1:], strict=False))
    assert f"compression ratio {90 / len(begins):.2f}" in html and f"Layer {layer}, KV head {head}" in html


def test_what_cannot_be_cut_is_refused(folders):
    model, tokenizer = load_model(folders.compressed), AutoTokenizer.from_pretrained(folders.compressed)
    with pytest.raises(ValueError, match="the text to cut into segments is empty"):
        segment_page(model, tokenizer, " \n", 0, 0, 10)
    with pytest.raises(ValueError, match="layer=2, head=0: the model has 2 layers, 2 heads"):
        segment_page(model, tokenizer, "line", 2, 0, 10)
    with pytest.raises(ValueError, match="needs a fast tokenizer"):
        segment_page(model, object(), "line", 0, 0, 10)
