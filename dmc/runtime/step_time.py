"""How long a step of decoding should take on a GPU, from what it launches and reads: predicted, not measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dmc.kernels.layout import CacheLayout
from dmc.runtime.capacity import slots_after


@dataclass(frozen=True)
class Device:
    """What a data sheet says of a GPU."""

    name: str
    bandwidth: float
    """Bytes a second."""
    flops: float
    """Of 16-bit matrix products, without sparsity, a second."""


DEVICES = (Device("A100", 2.04e12, 312e12), Device("H100", 3.35e12, 989e12))
"""SXM boards of 80 GB."""
REACHED = 0.8
"""Share of bandwidth and products that kernels reach."""
EAGER_LAUNCH, GAP = 6e-6, 1.5e-6
"""Seconds that the host takes for an operation of torch, and a GPU from one kernel to the next."""
HOST_READ = 1e-3
"""Seconds from the one read of a step to the next step's first launch: the scheduler, texts, and who is told."""
OPERATIONS_BESIDE_LAYERS = 40
"""Embedding, RoPE tables, last norm, logits, counts of what is held, choice of tokens."""


@dataclass(frozen=True)
class StepTime:
    """One step of decoding that feeds a token of each sequence."""

    launches: int
    weight_bytes: int
    cache_bytes: int
    """Of keys and values, raw recent ones included; fields of policies are not."""
    flops: int

    def seconds(self, device: Device, is_recorded: bool) -> float:
        """Predict: reads and products overlap; of an eager step's host and GPU the slower one decides."""
        reads = (self.weight_bytes + self.cache_bytes) / (REACHED * device.bandwidth)
        busy = max(reads, self.flops / (REACHED * device.flops)) + self.launches * GAP
        return (busy if is_recorded else max(busy, self.launches * EAGER_LAUNCH)) + HOST_READ


def launches_per_layer(layout: CacheLayout, compiles: bool = False) -> int:
    """Operations of torch that are no views, and kernels, of one layer of a Llama; a test counts them."""
    gates, delay = layout.compression is not None, layout.delay > 0
    return (13 if compiles else 33) + gates + 4 + delay


def decode_step(
    config: Any,
    layout: CacheLayout,
    weight_bytes: int,
    batch_size: int,
    context: int,
    ratio: float,
    compiles: bool = False,
) -> StepTime:
    """Add up what one step launches, reads and multiplies on one rank.

    Args:
        config: of a transformers causal LM.
        layout: of its cache on one rank.
        weight_bytes: of all parameters on this rank; of an embedding that is not the head's too, a row is read.
        batch_size: sequences.
        context: tokens that each has seen.
        ratio: CR >= 1 of each.
        compiles: whether decoder layers are compiled.
    """
    size = layout.dtype.itemsize
    if not getattr(config, "tie_word_embeddings", False):
        weight_bytes -= config.vocab_size * config.hidden_size * size
    heads, slots = layout.num_layers * layout.num_kv_heads, slots_after(layout, context, ratio)
    group = layout.num_query_heads // layout.num_kv_heads
    products = batch_size * (2 * weight_bytes // size + 4 * group * heads * (slots + layout.delay) * layout.head_dim)
    return StepTime(
        launches=layout.num_layers * launches_per_layer(layout, compiles) + OPERATIONS_BESIDE_LAYERS,
        weight_bytes=weight_bytes,
        cache_bytes=batch_size * heads * (slots * layout.entry_bytes + layout.delay * 2 * layout.head_dim * size),
        flops=products,
    )
