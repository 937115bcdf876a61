"""Which weights of a causal LM are one tensor: the tensors decide, the configuration follows, as in transformers.

A configuration may say that the head is the embedding although its file holds a head of its own. transformers reads
that head. Whatever builds a model from its configuration needs one that agrees with the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

ROWS = 2**14
"""Rows of two weights that are read and compared at a time."""


def tied_names(config: Any) -> dict[str, str]:
    """Return the weights that a family can tie, each with that which it is tied to: the head, the embedding."""
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return dict(getattr(model_class, "_tied_weights_keys", None) or {})


def settle_ties(config: Any, weights: Mapping[str, Any]) -> Any:
    """Untie a configuration, in place, whose weights hold both of a pair with different values.

    Args:
        config: transformers configuration of a causal LM.
        weights: tensors, or slices of safetensors, by name.
    Returns:
        The configuration.
    """
    pairs = tied_names(config).items() if getattr(config, "tie_word_embeddings", False) else ()
    for name, source in pairs:
        if name in weights and source in weights and not _equal(weights[name], weights[source]):
            config.tie_word_embeddings = False
    return config


def is_tied(model: Any) -> bool:
    """Tell whether the head and the embedding of a causal LM are one tensor."""
    pairs = tied_names(model.config)
    return all(_is_one(model.get_parameter(name), model.get_parameter(source)) for name, source in pairs.items()) and (
        bool(pairs) or bool(getattr(model.config, "tie_word_embeddings", False))
    )


def follow_tensors(model: Any) -> Any:
    """Let the configuration of a loaded causal LM say whether its head is its embedding; return the model."""
    if getattr(model.config, "tie_word_embeddings", None) not in (None, tied := is_tied(model)):
        model.config.tie_word_embeddings = tied
    return model


def _is_one(weight: Any, other: Any) -> bool:
    """Tell whether two weights are one parameter, or two of one place in memory; fake tensors have no address."""
    if weight is other or weight.shape != other.shape or weight.storage_offset() != other.storage_offset():
        return weight is other
    return weight.untyped_storage()._cdata == other.untyped_storage()._cdata


def _equal(weight: Any, other: Any) -> bool:
    """Compare two tensors, or slices of safetensors, some rows at a time."""
    shape, others = (list(part.get_shape() if hasattr(part, "get_shape") else part.shape) for part in (weight, other))
    if shape != others:
        return False
    for first in range(0, shape[0], ROWS):
        rows, theirs = weight[first : first + ROWS], other[first : first + ROWS]
        if rows.is_meta or theirs.is_meta:
            return rows.is_meta and theirs.is_meta
        if not torch.equal(rows.to(theirs.device, theirs.dtype), theirs):
            return False
    return True
