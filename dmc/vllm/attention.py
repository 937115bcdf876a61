"""What vLLM sees of attention: one KV cache layer for the whole model, its backend, and the metadata of a step.

Layers do not call the backend: they ask the cache of `worker_cache.py`, for keys and values enter it as gates decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import KVCacheLayout, KVCacheSpec

from dmc.vllm.worker_cache import WorkerCache

LAYER_NAME = "dmc.0"
"""Name of the one KV cache layer; vLLM sorts layers by the number in their names."""


@dataclass
class AttentionStep(AttentionMetadata):
    """The new tokens of a step, as the flat row has them; S sequences."""

    first_blocks: Tensor
    """vLLM's first block of each sequence, which is its own while it runs, int64 [S]."""
    begins: Tensor
    """Position of each sequence's first new token, int64 [S]."""
    num_new: list[int]
    """Number of each sequence's new tokens."""
    most: list[int]
    """What each of `begins` is at most: steps may be scheduled before the host has read the last."""


class AttentionStepBuilder(AttentionMetadataBuilder[AttentionStep]):
    """Takes what the cache asks out of vLLM's metadata of a step, without waiting for the device."""

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AttentionStep:
        """See `AttentionMetadataBuilder.build`; sequences without new tokens, which pad a step, are left out."""
        common = common_attn_metadata
        num_new = [count for count in common.query_start_loc_cpu.diff().tolist() if count]
        count, bounds = len(num_new), common.seq_lens_cpu_upper_bound
        ends = [common.max_seq_len] * count if bounds is None else bounds[:count].tolist()
        return AttentionStep(
            first_blocks=common.block_table_tensor[:count, 0].long(),
            begins=common.compute_num_computed_tokens()[:count].long(),
            num_new=num_new,
            most=[end - new for end, new in zip(ends, num_new, strict=True)],
        )


class DMCAttentionBackend(AttentionBackend):
    """Names the builder of a step's metadata; an implementation for single layers does not exist."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """See `AttentionBackend`; of one layer these are the same memory."""
        return KVCacheLayout.LBHNC, KVCacheLayout.BLHNC

    @staticmethod
    def get_name() -> str:
        """See `AttentionBackend`."""
        return "DMC"

    @staticmethod
    def get_impl_cls() -> Any:
        """Raise NotImplementedError: from it vLLM knows that the context is not divided among ranks."""
        raise NotImplementedError("layers attend through the cache of dmc.vllm.worker_cache")

    @staticmethod
    def get_builder_cls() -> type[AttentionStepBuilder]:
        """See `AttentionBackend`."""
        return AttentionStepBuilder


class CacheLayer(nn.Module, AttentionLayerBase):
    """The one layer with a KV cache that vLLM knows of; its blocks hold entries of all layers and heads."""

    def __init__(self, cache: WorkerCache, spec: KVCacheSpec) -> None:
        super().__init__()
        self.cache, self._spec = cache, spec

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take the memory of the pages."""
        self.kv_cache = kv_cache
        self.cache.bind_pages(kv_cache)

    def get_attn_backend(self) -> type[AttentionBackend]:
        """See `AttentionLayerBase`."""
        return DMCAttentionBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """See `AttentionLayerBase`."""
        return self._spec
