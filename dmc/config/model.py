"""The model that a run starts from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dmc.bounds import Count, check_fields


@dataclass(frozen=True)
class ModelConfig:
    """The model to start from: a folder or hub name, or a fresh one built from a Hugging Face configuration."""

    path: str | None = None
    """Folder or hub name of a pretrained Llama, Mistral, Qwen2 or Qwen3."""
    fresh: dict[str, Any] | None = None
    """Hugging Face configuration values of a randomly initialised model, `model_type` included."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in memory; bfloat16 trains in it throughout, RoPE angles and the gates excepted."""
    revision: str | None = None
    """Hub revision."""
    architecture: dict[str, Any] | None = None
    """Hugging Face configuration values of `path`, `model_type` included: what a plan needs without the hub."""
    merge_kv_heads: Count | None = None
    """KV heads per layer that those of `path` are averaged into before the run (grouped-query attention after the
    fact); None: they stay."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.fresh is None):
            raise ValueError(f"model.path={self.path!r}, model.fresh={self.fresh!r}: give exactly one of them")
        check_fields(self, "model.")
        if self.merge_kv_heads is not None and self.path is None:
            raise ValueError(
                f"model.merge_kv_heads={self.merge_kv_heads} merges the heads of a trained model: give model.path, or "
                "a fresh model model.fresh.num_key_value_heads"
            )
