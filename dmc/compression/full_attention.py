"""Checks that a model's layers are of known kinds, and that angles of RoPE depend on positions alone."""

from __future__ import annotations

from typing import Any

POSITION_FREE_ROPE = ("default", "linear", "llama3", "yarn")
"""RoPE types whose angles do not depend on the sequence's length."""
REACH = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Kinds of layers that see only the last tokens, and the configuration field with the size."""
RECURRENT = "linear_attention"
"""Kind of a layer without attention: a gated delta net (arXiv:2412.06464), which keeps a state of fixed size."""
RECURRENT_SIZES = (
    "linear_conv_kernel_dim", "linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads",
    "linear_value_head_dim",
)  # fmt: skip
"""Configuration fields with the sizes of a gated delta net's states; other layers of this kind have other states."""
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
    """Raise if attention to a cache of keys and values would silently be wrong for a model.

    Args:
        config: configuration of a transformers causal LM.
    Raises:
        NotImplementedError: a layer sees chunks or keeps another state, scores are capped, keys and values are
            compressed already, or RoPE depends on the sequence length.
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
                f"layer 0 of {model} has {name}={getattr(config, name)} and {meaning}, which a cache of keys and "
                "values does not follow; expected a model without"
            )
    for index, kind in enumerate(_layer_kinds(config)):
        if kind == RECURRENT and all(isinstance(getattr(config, size, None), int) for size in RECURRENT_SIZES):
            continue
        if kind != "full_attention" and kind not in REACH:
            raise NotImplementedError(
                f"layer {index} of {model} is {kind}: expected full_attention, sliding_attention or a gated delta net "
                "(linear_attention with linear_num_value_heads) in every layer"
            )
        if kind == "chunked_attention" and (reach := _reach(config, kind)) is not None:
            raise NotImplementedError(
                f"layer {index} of {model} has a chunk of {reach} tokens, its context is {context_length(config)}; "
                "expected full attention or a sliding window in every layer: attention_chunk_size None, or no less "
                "than max_position_embeddings"
            )
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in [parameters, *(part for part in parameters.values() if isinstance(part, dict))]:
        if (rope_type := rope.get("rope_type", "default")) not in POSITION_FREE_ROPE:
            raise NotImplementedError(
                f"layer 0 of {model} rotates by RoPE whose rope_type={rope_type!r} changes its angles as the sequence "
                f"grows, which cached entries cannot follow; expected one of {', '.join(POSITION_FREE_ROPE)}"
            )


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Return how many last tokens each layer of a model keeps.

    None: all, as a window of its whole context does; 0: none, as it has no attention.
    """
    return tuple(0 if kind == RECURRENT else _reach(config, kind) for kind in _layer_kinds(config))


def refuse_windows_alone(config: Any) -> None:
    """Raise a NotImplementedError if no layer of a model attends to its whole context."""
    windows = layer_windows(config)
    if None not in windows:
        has = (
            f"a sliding window of {windows[0]} tokens, its context is {context_length(config)}, and all layers have one"
        )
        raise NotImplementedError(
            f"layer 0 of this {config.model_type} model has {has if windows[0] else 'no attention, nor have others'}: "
            "expected a layer with full attention, whose cache grows with the text and can be compressed"
        )


def rotates_full_layers(config: Any) -> bool:
    """Whether layers with full attention rotate by RoPE: in two families those with a window alone do."""
    family = config.model_type.removeprefix("dmc_")
    return family != "cohere2" and (family != "exaone4" or config.sliding_window is None)


def _reach(config: Any, kind: str) -> int | None:
    reach = getattr(config, REACH.get(kind, ""), None)
    return reach if reach is not None and reach < context_length(config) else None


def _layer_kinds(config: Any) -> list[str]:
    """Return the kind of each layer, as a configuration's `layer_types`; some models have a window and no such list."""
    if getattr(config, "layer_types", None):
        return list(config.layer_types)
    slides = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return ["sliding_attention" if slides else "full_attention"] * config.num_hidden_layers
