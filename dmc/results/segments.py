"""HTML page of a text in the segments that one head's decisions make of it."""

from __future__ import annotations

import itertools
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from dmc.results.tasks.cache_analysis import decisions_of


def segment_page(model: Any, tokenizer: Any, text: str, layer: int, head: int, num_tokens: int) -> str:
    """Segment a text by the decisions of one head of a compressed model, once all have been executed.

    Args:
        model: compressed causal LM.
        tokenizer: a fast tokenizer, which knows the offsets of tokens.
        text: text to segment.
        layer: index of the layer.
        head: KV head of the layer.
        num_tokens: number of first tokens to use.
    Returns:
        A self-contained HTML page, every segment in a color unlike its neighbors'.
    Raises:
        ValueError: there is no such layer or head, the text is empty, or the tokenizer is not a fast one.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError("a segmentation needs a fast tokenizer (tokenizer.json), which returns the offsets of tokens")
    if not text.strip():
        raise ValueError("the text to cut into segments is empty")
    encoded = tokenizer(text, return_offsets_mapping=True)
    tokens, offsets = encoded["input_ids"][:num_tokens], encoded["offset_mapping"][:num_tokens]
    decisions = decisions_of(model, tokens)
    layers, heads, _ = decisions.shape
    if not (0 <= layer < layers and 0 <= head < heads):
        raise ValueError(f"layer={layer}, head={head}: the model has {layers} layers, {heads} heads")
    starts = [*(~decisions[layer, head]).nonzero().flatten().tolist(), len(tokens)]
    places = [begin for begin, _ in offsets] + [offsets[-1][1]]
    environment = Environment(
        loader=PackageLoader("dmc.results.report", "."), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("segments.html").render(
        title=f"Layer {layer}, KV head {head}",
        merges=model.compression.action == "merge",
        num_tokens=len(tokens),
        segments=[
            (begin, end, text[places[begin] : places[begin + 1]], text[places[begin + 1] : places[end]])
            for begin, end in itertools.pairwise(starts)
        ],
    )
