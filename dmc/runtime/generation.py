"""Results of the engine: continuations, their probabilities and their memory statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from dmc.budget import achieved_ratio
from dmc.runtime.paged_cache import PagedCache
from dmc.runtime.tally import ScoredPositions

FinishReason = Literal["length", "stop", "abort", "error"]
Step = tuple[int, float, dict[int, float]]
"""A token, its log-probability, and those of the most likely ones, as many as are reported."""


@dataclass(frozen=True)
class GenerationStats:
    """Memory of one sequence at its last step, before release, and averaged over steps; all zero if it never ran.

    Means are over the positions whose predictions were requested, of a turn in a session. Each is measured after its
    step as it would be token by token. Without any, they are the values of the last step. Ring buffers and tables count
    with their final size. Shared blocks count fully for each holder: `Engine.blocks_in_use` counts them once.
    """

    tokens_seen: int
    """Tokens fed, earlier turns of a session included: all but the last one generated, which is not fed."""
    slots: Tensor
    """Entries held per layer without a window and KV head, raw recent tokens included, int64 [L, H]."""
    achieved_ratio: float
    """tokens_seen * L * H / sum(slots), >= 1 for a compressed cache; 1 for a model whose layers all have a window."""
    bytes_ratio: float
    """Bytes of the entries, windows and recurrent states of a cache that compresses nothing, over `bytes_used`."""
    bytes_used: int
    """Bytes of slots and state: ring buffers, means, tables and recurrent states included."""
    bytes_allocated: int
    """Bytes with whole pages."""
    bytes_fast: int
    """Allocated bytes on the cache's device: all but those that a policy has offloaded."""
    num_preemptions: int
    """Times the sequence lost its cache to others and was computed again."""
    mean_tokens_seen: float
    mean_slots: Tensor
    """Mean of `slots` over positions, float64 [L, H]."""
    mean_bytes_used: float
    mean_bytes_allocated: float
    peak_bytes_allocated: int
    """Maximum over these positions; a policy's prompt may have held more before it was compressed."""

    @classmethod
    def of(cls, cache: PagedCache, row: int | None, held: ScoredPositions, num_preemptions: int = 0) -> GenerationStats:
        """Measure the sequence in a row of the cache.

        Args:
            cache: the cache.
            row: None: the sequence has no place in it.
            held: sums over the positions of the sequence.
            num_preemptions: how often it was preempted.
        """
        layout = cache.layout
        if row is None:
            slots = torch.zeros(layout.num_layers, layout.num_kv_heads * layout.ranks.size, dtype=torch.long)
            return cls(0, slots, 0.0, 0.0, 0, 0, 0, num_preemptions, 0.0, slots.double(), 0.0, 0.0, 0)
        slots, used, allocated = cache.slots(row), cache.bytes_used(row), cache.bytes_allocated(row)
        tokens_seen = int(cache.tokens_seen[row])
        recent = min(tokens_seen, layout.delay)
        entries, blocks, most = cache.tally.beyond(row, held, cache.all_lengths[:, row])
        of_full, num_full = entries[: layout.num_layers].cpu(), layout.num_layers * tokens_seen
        stock = layout.ranks.all_reduce(layout.num_kv_heads * layout.entry_bytes)
        stock *= num_full + sum(min(tokens_seen, ring) for ring in layout.rings)
        stock += layout.recurrent_bytes
        if not held.positions:
            held = ScoredPositions(1, tokens_seen, recent)
        ranks, block, number, total = layout.ranks, cache.block_bytes, held.positions, int(slots.sum())
        return cls(
            tokens_seen=tokens_seen,
            slots=slots,
            achieved_ratio=achieved_ratio(tokens_seen, len(slots), slots.shape[1], total) if layout.num_layers else 1.0,
            bytes_ratio=stock / used,
            bytes_used=used,
            bytes_allocated=allocated,
            bytes_fast=cache.bytes_fast(row),
            num_preemptions=num_preemptions,
            mean_tokens_seen=held.tokens / number,
            mean_slots=slots + ranks.all_gather(of_full, -1).double() / number + held.recent / number - recent,
            mean_bytes_used=used + ranks.all_reduce(int(entries.sum())) * block / cache.block_size / number,
            mean_bytes_allocated=allocated + ranks.all_reduce(blocks) * block / number,
            peak_bytes_allocated=allocated + ranks.all_reduce(most) * block,
        )


@dataclass(frozen=True)
class Scoring:
    """Scores of one teacher-forced continuation."""

    logprobs: Tensor
    """Natural-log probabilities at every position, float32 [len(continuation), vocab], or as reduced by `keep`."""
    stats: GenerationStats


@dataclass(frozen=True)
class Generation:
    """The continuation of one prompt."""

    token_ids: list[int]
    """Every generated token, those of a stop string included."""
    text: str | None
    """Without special tokens, cut before a stop string; None without a tokenizer."""
    logprobs: list[float]
    """Natural-log probability of each chosen token under the unmodified distribution."""
    stats: GenerationStats
    finish_reason: FinishReason
    """`length`: max_new_tokens; `stop`: end of sequence, stop token or stop string; `abort`: taken off;
    `error`: the model's logits were no numbers, or the sequence has outgrown the memory."""
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    """The most likely tokens at each position, as many as requested, under the unmodified distribution."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens but the first, if requested."""
    prompt_top_logprobs: list[dict[int, float]] = field(default_factory=list)
    """The most likely tokens at each of these positions."""
    alternatives: list[Generation] = field(default_factory=list)
    """The other ones of `n` continuations."""
