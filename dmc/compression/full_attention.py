"""Checks that a model uses full causal attention, with RoPE angles that depend on positions alone."""

from __future__ import annotations

from typing import Any

POSITION_FREE_ROPE = ("default", "linear", "llama3", "yarn")
"""RoPE types whose angles do not depend on the sequence's length."""
REACH = {
    "sliding_attention": ("sliding window", "sliding_window"),
    "chunked_attention": ("chunk", "attention_chunk_size"),
}
"""Kinds of layers that see only the last tokens: their name, and the configuration field with the size."""
OTHER_MATHS = {
    "attn_logit_softcapping": "caps attention scores",
    "kv_lora_rank": "keeps one latent vector instead of keys and values (MLA)",
    "index_topk": "lets an indexer choose the tokens that are attended to",
}
"""Configuration fields that change the attention itself if they are set."""
SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "max_position_embeddings")


def context_length(config: Any) -> int:
    """Return the number of positions of a model; YaRN's factor may stretch that of the configuration."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "yarn":
        return config.max_position_embeddings
    stretched = rope.get("factor", 1) * (rope.get("original_max_position_embeddings") or config.max_position_embeddings)
    return max(config.max_position_embeddings, int(stretched))


def refuse_other_attention(config: Any) -> None:
    """Raise if full attention to a cache of keys and values would silently be wrong for a model.

    A window of at least the model's context counts as full attention.

    Args:
        config: configuration of a transformers causal LM.
    Raises:
        NotImplementedError: a layer sees the last tokens only or keeps another state, scores are capped, keys and
            values are compressed already, or RoPE depends on the sequence length.
    """
    model = f"this {config.model_type} model"
    for name in SIZES:
        if not isinstance(getattr(config, name, None), int):
            raise NotImplementedError(
                f"the configuration of {model} has no {name}: expected a decoder like Llama, with RoPE and full "
                "attention in every layer"
            )
    for name, meaning in OTHER_MATHS.items():
        if getattr(config, name, None) is not None:
            raise NotImplementedError(
                f"{name}={getattr(config, name)} of {model} {meaning}, which a cache of keys and values does not "
                f"follow; expected a model without"
            )
    for index, kind in enumerate(_layer_kinds(config)):
        if kind != "full_attention" and kind not in REACH:
            raise NotImplementedError(f"layer {index} of {model} is {kind}: expected full_attention in every layer")
        what, field = REACH.get(kind, ("", ""))
        reach = getattr(config, field, None)
        if reach is not None and reach < context_length(config):
            raise NotImplementedError(
                f"layer {index} of {model} has a {what} of {reach} tokens, its context is "
                f"{context_length(config)}; expected full attention in every layer: {field} None, or no less "
                "than max_position_embeddings"
            )
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in [parameters, *(part for part in parameters.values() if isinstance(part, dict))]:
        if (rope_type := rope.get("rope_type", "default")) not in POSITION_FREE_ROPE:
            raise NotImplementedError(
                f"rope_type={rope_type!r} changes its angles as the sequence grows, which cached entries cannot "
                f"follow; expected one of {', '.join(POSITION_FREE_ROPE)}"
            )


def _layer_kinds(config: Any) -> list[str]:
    """Return the kind of each layer, as a configuration's `layer_types`; some models have a window and no such list."""
    if getattr(config, "layer_types", None):
        return list(config.layer_types)
    slides = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return ["sliding_attention" if slides else "full_attention"] * config.num_hidden_layers
