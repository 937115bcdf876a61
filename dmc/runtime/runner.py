"""The model and its cache: segments of sequences in, logits out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dmc.compression import CompressionConfig
from dmc.kernels import choose_backend
from dmc.ranks import ALONE
from dmc.runtime.backend_linear import use_linear_of
from dmc.runtime.paged_cache import CacheLayout, PagedCache
from dmc.runtime.scheduler import Segment
from dmc.runtime.step import Step
from dmc.runtime.stock_attention import use_stock_attention


def layout_of(model: Any) -> CacheLayout:
    """Read a cache's shape off a model; a compressed one carries its gates' configuration."""
    config = model.config
    compression = getattr(config, "compression", None)
    parameter = next(model.parameters())
    ranks = getattr(model, "ranks", ALONE)
    return CacheLayout(
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads // ranks.size,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        dtype=parameter.dtype,
        device=parameter.device,
        compression=None if compression is None else CompressionConfig.from_dict(compression),
        ranks=ranks,
    )


class Runner:
    """Feeds segments to a model, compressed or stock, in one row without padding.

    Args:
        model: causal LM; its linear layers are made to ask the backend, a stock one's attention the paged cache.
        cache: where it keeps keys and values.
        kernels: backend name, "auto" picks.
    Raises:
        ValueError: there is no such backend, or it cannot serve this cache.
        ImportError: it needs a package that is not installed.
    """

    def __init__(self, model: Any, cache: PagedCache, kernels: str) -> None:
        self.model, self.cache = model, cache
        layout = cache.layout
        self._backend = choose_backend(kernels, layout.dtype, layout.head_dim, cache.block_size, layout.device)
        use_linear_of(self._backend, model)
        is_stock = layout.compression is None
        self._rotary = None if is_stock else model.rotary_tables
        if is_stock:
            use_stock_attention(model)

    @torch.no_grad()
    def forward(self, segments: list[Segment]) -> Tensor:
        """Feed segments; return the logits that are wanted, segment after segment, [rows, vocab].

        Raises:
            OutOfBlocksError: see `PagedCache.reserve`; nothing has changed.
        """
        rows = [segment.sequence.row for segment in segments if segment.sequence.row is not None]
        step = Step(self.cache, self._backend, rows, [len(segment.tokens) for segment in segments], self._rotary)
        tokens: list[int] = []
        wanted: list[int] = []
        for segment in segments:
            wanted += range(len(tokens) + segment.first_wanted, len(tokens) + len(segment.tokens))
            tokens += segment.tokens
        device = self.cache.layout.device
        output = self.model(
            torch.tensor([tokens], device=device),
            position_ids=step.position_ids,
            paged_cache=step,
            use_cache=False,
            logits_to_keep=torch.tensor(wanted, dtype=torch.long, device=device),
        )
        step.finish()
        for segment in segments:
            segment.sequence.num_fed += len(segment.tokens)
        return output.logits[0]
