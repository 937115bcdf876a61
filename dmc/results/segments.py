"""A text cut into the segments that one head makes of it, as data and as a page."""

from __future__ import annotations

import html
import itertools
from dataclasses import dataclass
from typing import Any

from dmc.results.tasks.inside import decisions_of

COLORS = 6
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.9 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }}
pre {{ font: 14px/2 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }}
.s {{ border-radius: .3em; padding: .15em 0; background: hsl(calc(var(--c) * 60) 85% 85%); }}
.gone {{ opacity: .5; }}
@media (prefers-color-scheme: dark) {{ .s {{ background: hsl(calc(var(--c) * 60) 50% 30%); }} }}
</style></head><body><h1>{title}</h1><p>{legend}</p><pre>{body}</pre></body></html>
"""


@dataclass(frozen=True)
class Segment:
    """Neighbouring tokens that share an entry of the cache: the first is kept, the others merged into it or dropped."""

    begin: int
    """Position of the first token."""
    end: int
    """One behind the last."""
    kept: str
    """Text of the token that is kept."""
    rest: str
    """Text of the others."""


@dataclass(frozen=True)
class Segmentation:
    """A text as one head holds it."""

    layer: int
    head: int
    action: str
    """`merge` or `drop`."""
    segments: list[Segment]

    def page(self) -> str:
        """Write a self-contained HTML page, every segment in a color unlike its neighbours'."""
        gone = " gone" if self.action == "drop" else ""
        spans = []
        for index, each in enumerate(self.segments):
            tokens = each.end - each.begin
            title = f"segment {index + 1}: {tokens} token{'s' * (tokens > 1)} from position {each.begin} on"
            rest = f'<span class="rest{gone}">{html.escape(each.rest)}</span>' if each.rest else ""
            style = f"--c:{index % COLORS}"
            spans.append(f'<span class="s" style="{style}" title="{title}">{html.escape(each.kept)}{rest}</span>')
        num_tokens = self.segments[-1].end
        ratio = num_tokens / len(self.segments)
        fate = "those merged into it" if self.action == "merge" else "those dropped behind it, shown pale"
        legend = (
            f"Each color is one entry of the cache: a token, and {fate}. {num_tokens} tokens, "
            f"{len(self.segments)} entries: compression ratio {ratio:.2f}."
        )
        title = f"Layer {self.layer}, KV head {self.head}"
        return PAGE.format(title=title, legend=legend, body="".join(spans))


def segment_text(model: Any, tokenizer: Any, text: str, layer: int, head: int, num_tokens: int) -> Segmentation:
    """Cut a text as a head of a compressed model does, once all decisions have been executed.

    Args:
        model: compressed causal LM.
        tokenizer: a fast one, which knows where tokens stand in the text.
        text: what is cut.
        layer: whose decisions.
        head: KV head of the layer.
        num_tokens: of the text that are used.
    Raises:
        ValueError: there is no such layer or head, the text is empty, or the tokenizer is not a fast one.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError("a segmentation needs a fast tokenizer (tokenizer.json), which knows the places of tokens")
    if not text.strip():
        raise ValueError("the text to cut into segments is empty")
    encoded = tokenizer(text, return_offsets_mapping=True)
    tokens, offsets = encoded["input_ids"][:num_tokens], encoded["offset_mapping"][:num_tokens]
    merged = decisions_of(model, tokens)
    if not (0 <= layer < merged.shape[0] and 0 <= head < merged.shape[1]):
        raise ValueError(f"layer={layer}, head={head}: the model has {merged.shape[0]} layers, {merged.shape[1]} heads")
    starts = [*(~merged[layer, head]).nonzero().flatten().tolist(), len(tokens)]
    places = [begin for begin, _ in offsets] + [offsets[-1][1]]
    segments = []
    for begin, end in itertools.pairwise(starts):
        kept, rest = text[places[begin] : places[begin + 1]], text[places[begin + 1] : places[end]]
        segments.append(Segment(begin, end, kept, rest))
    return Segmentation(layer, head, model.compression.action, segments)
