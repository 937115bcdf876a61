"""What kernels share: one layer of the cache, the tokens that enter it, and what a query then sees.

Shapes beyond the legend of `dmc.compression.base`: C cache rows, S sequences of one call, n new tokens of each (1 while
decoding), R tokens of raw history, W the gate's delay, N blocks of the pool, M blocks of a block table. Query head h
uses KV head h // group.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dmc.compression import CompressionConfig


@dataclass
class LayerCache:
    """One layer's part of the cache, and the pool that all layers share; kernels write all of it in place."""

    key_pages: Tensor
    """Rotated keys, [N, block, D]."""
    value_pages: Tensor
    """[N, block, D]."""
    free_blocks: Tensor
    """Stack of free block ids, int32 [N]; the next one to take is `free_blocks[num_free - 1]`."""
    num_free: Tensor
    """Height of the stack, int32 [1]. Whoever calls a kernel has made sure that it suffices."""
    block_tables: Tensor
    """Blocks of each head in order, int32 [C, H, M]; M suffices for what a call may append."""
    lengths: Tensor
    """Slots in pages, int32 [C, H]."""
    history_key: Tensor
    """The last R raw keys, unrotated, in a ring: the token at position p lies at p % R; [C, H, R, D]."""
    history_value: Tensor
    """[C, H, R, D]."""
    history_merged: Tensor
    """Their thresholded decisions, bool [C, H, R]."""
    history_omega: Tensor
    """Their importance, float32 [C, H, R]."""
    mean: Tensor | None = None
    """Exact accumulation only: mean key (unrotated) and value of the open slot, float32 [C, H, 2 D]."""
    weight: Tensor | None = None
    """Exact accumulation only: total importance of the open slot, 0 before the first token, float32 [C, H]."""

    @property
    def block_size(self) -> int:
        """Slots of a page."""
        return self.key_pages.shape[1]


@dataclass
class EntryNotes:
    """What an evicting cache knows of each entry beside key and value: pages like theirs, under the same block tables.

    A head's notes lie in the order of age, oldest first, whatever the order of its keys and values.
    """

    position: Tensor
    """The token's place in its sequence, int32 [N, block]."""
    slot: Tensor | None
    """Where its key and value lie among the head's slots, int32 [N, block]; None: at its age."""
    sums: Tensor
    """Running sums over the queries so far, K of them, float32 [K, N, block]."""


@dataclass
class NewTokens:
    """The next n tokens of S sequences, as their gates see them."""

    rows: Tensor
    """Cache row of each sequence, int64 [S]."""
    positions: Tensor
    """int64 [S, n]."""
    key: Tensor
    """Unrotated, without the borrowed neuron, [S, H, n, D]; already rotated where there is no compression."""
    value: Tensor
    """[S, H, n, D]."""
    merged: Tensor | None = None
    """Thresholded decisions, bool [S, H, n]; None: there is no compression, every token is appended."""
    omega: Tensor | None = None
    """Importance, float32 [S, H, n]."""
    cos: Tensor | None = None
    """RoPE tables, borrowed neuron removed, at the n + W positions up to the last new token's, [S, n + W, D]."""
    sin: Tensor | None = None


@dataclass
class Recent:
    """Raw tokens that a delayed gate holds back: query i sees those of i..i + W - 1 that exist."""

    key: Tensor
    """Rotated, [S, H, n + W - 1, D]."""
    value: Tensor
    """[S, H, n + W - 1, D]."""
    exists: Tensor
    """False before the start of a sequence, bool [S, n + W - 1]."""


@dataclass
class Top:
    """The open slot as it was after each token that entered the stream: query i sees state i if it exists."""

    key: Tensor
    """Rotated at the position of the last token merged, [S, H, n, D]."""
    value: Tensor
    """[S, H, n, D]."""
    exists: Tensor
    """False while the delay holds back the first token, bool [S, n]."""


@dataclass
class Seen:
    """What the queries of the new tokens attend to, besides nothing."""

    slots: Tensor
    """The first `slots[i]` slots in pages, which no later token of the call changes, int [S, H, n]."""
    top: Top | None = None
    """Merge gates with n > 1; a single token's state is the last of its slots."""
    recent: Recent | None = None
    """Delayed gates."""


def history_size(config: CompressionConfig | None) -> int:
    """Raw tokens kept beside the pages (R): those the delay holds back, and the rest of the merge window."""
    if config is None:
        return 0
    window = config.window_size if config.action == "merge" else None
    return config.delay + (0 if window is None else window - 1)
