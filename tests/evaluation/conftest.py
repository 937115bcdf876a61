"""A tiny stock model, its compressed twin, and a text that they have a tokenizer for."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from dmc import retrofit
from dmc.compression import CompressionConfig
from dmc.data import train_tokenizer

VOCAB_SIZE = 300


@dataclass(frozen=True)
class Folders:
    """Where they lie."""

    stock: Path
    compressed: Path
    text: Path


def build_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=0,
        initializer_range=0.2,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("models")
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    text = root / "text.txt"
    text.write_text(" ".join(random.Random(0).choices(words, k=2000)))
    tokenizer = train_tokenizer([text.read_text()], VOCAB_SIZE, root / "tokenizer")
    found = Folders(root / "stock", root / "compressed", text)
    gates = CompressionConfig(decision_offset=0.0, target_ratio=2.0)
    for folder, model in ((found.stock, build_model()), (found.compressed, retrofit(build_model(), gates))):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return found
