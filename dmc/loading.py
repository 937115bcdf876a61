"""Load a model and its tokenizer for inference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from dmc.models import load_model


def load_with_tokenizer(path: str, dtype: str = "auto", revision: str | None = None) -> tuple[Any, Any]:
    """Load a model, on the GPU if there is one, and its tokenizer, or None if it has none.

    Args:
        path: folder or hub name of a stock or compressed model.
        dtype: dtype of the weights.
        revision: hub revision.
    Raises:
        FileNotFoundError, ValueError: see `load_model` and `load_tokenizer`.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(path, dtype=dtype, revision=revision).to(device)
    lacks_tokenizer = Path(path).is_dir() and not any(Path(path).glob("tokenizer*"))
    return model, None if lacks_tokenizer else load_tokenizer(path, revision, model.config.vocab_size)


def load_tokenizer(path: str | Path, revision: str | None = None, vocab_size: int | None = None) -> Any:
    """Load a tokenizer without running code from its folder.

    Args:
        path: folder or hub name.
        revision: hub revision.
        vocab_size: vocabulary size of the model that reads its tokens; None: any.
    Raises:
        ValueError: the tokenizer is missing or damaged, or has more tokens than the model.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
    except Exception as error:
        raise ValueError(f"{path} has no tokenizer, or a damaged one ({error}): copy its files again") from error
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(
            f"the tokenizer of {path} has token ids up to {largest}, its model knows only {vocab_size} tokens"
        )
    return tokenizer
