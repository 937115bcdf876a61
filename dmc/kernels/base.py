"""Types that kernels share: one layer of the cache, its new tokens, and the keys that a query then sees.

A head's slots are in no order: the age of an entry follows from its position.

Shapes beyond the legend of `dmc.compression.base`: C cache rows, S sequences of one call, T new tokens of all of them
in one flat row (S while decoding), R tokens of raw history, W the gate's delay, N blocks of the pool, M blocks of a
table. Query head h uses KV head h // group.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BIAS = "bias"
"""Name of the slots' field that attention adds to their scores, if a policy declares it."""


@dataclass
class LayerCache:
    """One layer's part of the cache, and the pool that all layers share; kernels write all of it in place."""

    key_pages: Tensor
    """Rotated keys, [N, block, D]; int8 where there are scales."""
    value_pages: Tensor
    """Values, [N, block, D]."""
    free_blocks: Tensor
    """Stack of free block ids, int32 [N]; the next one to take is `free_blocks[num_free - 1]`."""
    num_free: Tensor
    """Height of the stack, int32 [1]; the caller of a kernel ensures that it suffices."""
    block_tables: Tensor
    """Blocks of each head in order, int32 [C, H, M]; M suffices for what a call may append."""
    lengths: Tensor
    """Number of slots in pages, int32 [C, H]."""
    history_key: Tensor
    """The last R raw keys, unrotated, in a ring buffer: the token at position p is at p % R; [C, H, R, D]."""
    history_value: Tensor
    """The last R raw values, [C, H, R, D]."""
    history_decisions: Tensor
    """Their thresholded decisions, bool [C, H, R]."""
    history_omega: Tensor
    """Their importance, float32 [C, H, R]."""
    mean: Tensor | None = None
    """Exact accumulation only: mean key (unrotated) and value of the open slot, float32 [C, H, 2 D]."""
    weight: Tensor | None = None
    """Exact accumulation only: total importance of the open slot, 0 before the first token, float32 [C, H]."""
    key_scales: Tensor | None = None
    """8-bit pages only: factors of the keys, float32 [N, block, 1]."""
    value_scales: Tensor | None = None
    """Likewise, of the values."""
    entry_metadata: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """Further metadata of every slot, 4 bytes each, [N, block]."""
    sinks: Tensor | None = None
    """Logit of each query head that its softmax counts beside the keys' (attention sinks), [H_q]; None: without."""

    @property
    def block_size(self) -> int:
        """Number of slots of a page."""
        return self.key_pages.shape[1]

    @property
    def scales(self) -> tuple[Tensor, Tensor] | None:
        """Factors of 8-bit keys and values, [N, block, 1] each; None: pages hold the model's dtype."""
        return None if self.key_scales is None or self.value_scales is None else (self.key_scales, self.value_scales)

    @property
    def bias(self) -> Tensor | None:
        """What is added to each slot's scores, float32 [N, block]; None: nothing is."""
        return self.entry_metadata.get(BIAS)

    @property
    def entry_pages(self) -> list[Tensor]:
        """Pages of keys and values, [N, block, D], then their scales, [N, block, 1], if they have any."""
        return [self.key_pages, self.value_pages, *(self.scales or ())]

    @property
    def slot_pages(self) -> list[Tensor]:
        """All pages with data of slots, [N, block, ...]: what moves with a slot."""
        return [*self.entry_pages, *self.entry_metadata.values()]


@dataclass
class NewTokens:
    """Keys, values and gate outputs of the new tokens of a batch."""

    key: Tensor
    """Unrotated keys, [T, H, D]; already rotated where there is no compression."""
    value: Tensor
    """Values, [T, H, D]."""
    decisions: Tensor | None = None
    """Thresholded decisions, bool [T, H]; None: there is no compression, every token is appended."""
    omega: Tensor | None = None
    """Importance, float32 [T, H]."""

    def part(self, where: Tensor | slice) -> NewTokens:
        """Take some of the tokens."""
        gates = (None if gate is None else gate[where] for gate in (self.decisions, self.omega))
        return NewTokens(self.key[where], self.value[where], *gates)


@dataclass
class Recent:
    """Raw tokens that a delayed gate holds back, flat: W - 1 earlier ones of each sequence, then its new ones.

    The i-th query of a sequence sees its i-th to (i + W - 1)-th that exist.
    """

    key: Tensor
    """Rotated keys, [T + S (W - 1), H, D]."""
    value: Tensor
    """Values, [T + S (W - 1), H, D]."""
    exists: Tensor
    """False before the start of a sequence, bool [T + S (W - 1)]."""


@dataclass
class OpenSlotState:
    """State of the open slot after each token that entered the stream: query i sees state i if it exists."""

    key: Tensor
    """Key, rotated at the position of the last token merged, [T, H, D]."""
    value: Tensor
    """Value, [T, H, D]."""
    exists: Tensor
    """False while the delay holds back the first token, bool [T]."""


@dataclass
class VisibleKeys:
    """Everything that the queries of the new tokens attend to."""

    slots: Tensor
    """Number of first slots in pages that a query sees; no later token of the call changes them, int32 [T, H]."""
    open_slot: OpenSlotState | None = None
    """Set by merge gates where a sequence has several tokens; a single token's state is the last of its slots."""
    recent: Recent | None = None
    """Set by delayed gates."""
    is_causal: bool = False
    """Whether every token has been appended: a query sees one slot more than the one before it, the last one all."""
    chunk_ends: Tensor | None = None
    """What Triton's append of single tokens tells its decode attention: chunks of the heads up to each, int32 [S H]."""


Weights = tuple[Tensor, Tensor | None]
"""Weight of a linear layer, [outputs, inputs], and its bias, [outputs] or None."""
NO_WEIGHTS = (None, None)


class LayerWeights(NamedTuple):
    """Of a decoder layer like Llama's."""

    norm: Tensor
    """Before attention, [hidden]."""
    norm_eps: float
    mlp_norm: Tensor
    mlp_norm_eps: float
    query: Weights
    key: Weights
    value: Weights
    output: Weights
    """Behind attention."""
    gate: Weights
    up: Weights
    down: Weights
    adapter: Weights | tuple[None, None] = NO_WEIGHTS
    """Of gates: rows of decision and importance of each KV head side by side."""


HOPPER = 9
"""Major compute capability of an H100."""


@functools.cache
def major_capability(device: torch.device) -> int:
    """Major compute capability of an NVIDIA GPU; 0 of another device."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device)[0] if is_nvidia else 0
