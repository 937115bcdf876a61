"""Tell how many requests a GPU holds at each compression ratio, from a model's configuration alone."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from transformers import AutoModelForCausalLM

from dmc.budget import sequence_ratio
from dmc.compression import CompressionConfig
from dmc.compression.full_attention import layer_windows
from dmc.config import build_config
from dmc.config.settings import Count, NonNegative, Positive, Ratio, checked_dataclass
from dmc.gguf import ModelName
from dmc.models import retrofit
from dmc.models.loading import read_hub_config
from dmc.models.weights import read_model_config
from dmc.runtime.capacity import capacities
from dmc.runtime.model_view import layout_of

GIB = 2**30


@checked_dataclass(frozen=True)
class CapacityConfig:
    """A model and a GPU."""

    model: ModelName
    """Folder, hub name or GGUF file."""
    gpu: Positive = 80.0
    """GiB."""
    context: Count = 4096
    """Tokens of prompt and answer."""
    ratios: Annotated[list[Ratio], Field(min_length=1)] = field(default_factory=lambda: [1.0, 2.0, 4.0, 8.0])
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    kv_cache_dtype: str = "auto"
    action: Literal["merge", "drop"] = "drop"
    """What a stock model's future gates do, and how many tokens later; a compressed folder says so itself."""
    delay: NonNegative = 16


def print_capacity(config: CapacityConfig) -> None:
    """Print the table."""
    folder, dtype = Path(config.model), getattr(torch, config.dtype)
    is_local = folder.is_dir() or config.model.startswith(("/", ".", "~"))
    model_config = read_model_config(folder) if is_local else read_hub_config(config.model)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, dtype=dtype)
        if getattr(model_config, "compression", None) is None:
            model = retrofit(model, CompressionConfig(action=config.action, delay=config.delay))
    weights = sum({id(weight): weight.numel() * weight.element_size() for weight in model.parameters()}.values())
    layout = layout_of(model).stored_as(config.kv_cache_dtype)
    rows = capacities(model_config, layout, weights, int(config.gpu * GIB), config.context, config.ratios)
    print(f"{config.model}: weights {weights / GIB:.2f} GiB in {config.dtype}, one GPU of {config.gpu:g} GiB\n")
    print(f"| CR | bytes of {config.context:,} tokens (MiB) | requests held at once | longest request (tokens) |")
    print("|---|---|---|---|")
    for row in rows:
        print(f"| {row.ratio:g} | {row.request_bytes / 2**20:,.1f} | {row.requests:,} | {row.longest:,} |")
    windows, full = layer_windows(model_config), layer_windows(model_config).count(None)
    if full < len(windows):
        of_all = (f"{sequence_ratio(ratio, config.context, windows):.2f} at CR {ratio:g}" for ratio in config.ratios)
        print(f"\nCR is that of {full} of {len(windows)} layers, which attend to all tokens.", end=" ")
        print(f"Of all keys and values of {config.context:,} tokens it is {', '.join(of_all)}.")
    print("\nEvery head is taken to hold as much; heads that differ need up to half a block more.")


def main(settings: Any) -> None:
    """Print the table of a model and a GPU."""
    print_capacity(build_config(CapacityConfig, settings))
