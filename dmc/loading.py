"""A model and its tokenizer, ready to serve."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoTokenizer

from dmc.models import load_model


def load_with_tokenizer(path: str, dtype: str = "auto", revision: str | None = None) -> tuple[Any, Any]:
    """Load a model, on the GPU if there is one, and its tokenizer, None if it has none.

    Args:
        path: folder or hub name of a stock or compressed model.
        dtype: of the weights.
        revision: hub revision.
    Raises:
        ValueError: see `load_model`.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
    except (OSError, ValueError):
        tokenizer = None
    return load_model(path, dtype=dtype, revision=revision).to(device), tokenizer
