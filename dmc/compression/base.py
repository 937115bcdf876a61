"""The words of the learned method: its configuration, what a gate says, what is recorded, and what a cache must offer.

Shape legend, used everywhere in `dmc`:

    B batch | L layers | H KV heads | H_q query heads = H * group | T time (tokens) | D head_dim
    query [B, H_q, T, D], key and value [B, H, T, D], one number per KV head and token [B, H, T].
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import torch
from torch import Tensor

from dmc.bounds import Bounds, check_fields
from dmc.budget import check_ratio
from dmc.ranks import ALONE, Ranks


@dataclass(frozen=True)
class CompressionConfig:
    """How a gate decides, what it does and when: algorithm and constants of Dynamic Memory Compression (2403.09636).

    Two axes, `action` and `delay`: merging at once is DMC, dropping later is DMS (2506.05345). Two more are the paper's
    ablations: who decides (`decisions`), and how merged tokens are weighted (`weighting`).

    Raises:
        ValueError: a value is out of range, a delay is missing, or fixed decisions are to drop or to weigh tokens.
    """

    action: Literal["merge", "drop"] = "merge"
    """What happens to a token whose decision is 1: merged into the slot before it, or dropped."""
    decisions: Literal["per_head", "per_layer", "fixed"] = "per_head"
    """per_head: each KV head for itself; per_layer: all heads of a layer as one, by the mean of their logits
    (DMC-HardC); fixed: by the token's position alone, groups of `target_ratio` tokens (Fixed Memory Pooling)."""
    gate_input: Literal["neuron", "hidden", "both", "query"] = "neuron"
    """What importance and decision are read from. neuron: a borrowed channel of query and key, with no new parameter;
    hidden: a linear adapter on the layer's input, and no channel is lost to attention; both: the sum of the two; query:
    the decision from a channel of each group's first query, which that query head alone loses, and equal importance."""
    decided_token: Literal["own", "previous"] = "own"
    """Whose fate a token decides: its own, or that of the token before it, which needs a delay."""
    weighting: Literal["learned", "uniform"] = "learned"
    """Importance of a token in what it is merged into: learned; uniform: omega = 1."""
    delay: Annotated[int, Bounds(least=0, whole=True, note="tokens")] = 0
    """Tokens a decision waits before it is executed; until then the token stays raw."""
    window_size: Annotated[int, Bounds(least=1, whole=True, note="tokens; None: whole segments")] | None = 12
    """Tokens that one merged slot averages at most; None: all of its segment (exact accumulation)."""
    neuron_index: Annotated[int, Bounds(whole=True, note="channel of a head")] = -1
    """Channel of query and key that carries importance and decision; the last pairs with RoPE's lowest frequency."""
    decision_offset: Annotated[float, Bounds()] = 5.0
    """Subtracted from the decision neuron; calibrated at export so that the thresholded ratio meets the target."""
    decision_scale: Annotated[float, Bounds(above=0, most=1e6, note="a factor on logits of some units")] = 1.0
    """Factor on the decision neuron: under Adam, the learning rate of the rows that decide over that of all others."""
    omega_offset: Annotated[float, Bounds()] = 5.0
    """Added to the importance logit, the group mean of the query neurons."""
    eps: Annotated[float, Bounds(above=0, most=1, note="learned importances are below 1, and 0 divides by 0")] = 2**-7
    """Added to the importance: keeps it positive, in training and at inference alike."""
    temperature: Annotated[float, Bounds(above=0, most=1e3, note="at which all decisions are near 0.5")] = 0.1
    """Temperature of the Gumbel-sigmoid relaxation in training."""
    target_ratio: float = 4.0
    """Compression ratio the model is (or was) trained for, >= 1; fixed decisions have exactly this one."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.action == "drop" and self.delay < 1:
            raise ValueError("action='drop' needs delay >= 1: a token dropped at once would never be seen")
        if self.decided_token == "previous" and (self.delay < 1 or self.decisions == "fixed"):
            raise ValueError(
                "decided_token='previous' needs delay >= 1 and decisions that are read: the next token tells what "
                "becomes of one"
            )
        if self.decisions == "fixed" and self.gate_input != "neuron":
            raise ValueError(f"decisions='fixed' reads nothing: gate_input={self.gate_input!r} would train for nobody")
        if self.decisions == "fixed" and self.action == "drop":
            raise ValueError(
                "decisions='fixed' pools tokens by their position: it cannot drop them; use action='merge'"
            )
        if self.decisions == "fixed" and self.weighting == "learned":
            raise ValueError(
                "decisions='fixed' borrows no neuron that could tell how important a token is: use weighting='uniform'"
            )
        check_ratio(self.target_ratio, "target_ratio")

    @property
    def borrows_neuron(self) -> bool:
        """Whether a channel of query and key carries importance and decision, and is lost to attention."""
        return self.decisions != "fixed" and self.gate_input in ("neuron", "both")

    @property
    def has_adapter(self) -> bool:
        """Whether every layer has a linear map from its input to importance and decision."""
        return self.gate_input in ("hidden", "both")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CompressionConfig:
        """Build from plain values, as stored in an exported `config.json`.

        Raises:
            ValueError: it is no mapping, a key is unknown, or a value is out of range.
        """
        if not isinstance(values, dict):
            raise ValueError(f"compression={values!r}: expected a mapping of settings, as an export writes it")
        known = {item.name for item in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown compression setting {', '.join(unknown)}: expected some of {', '.join(known)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for `config.json`."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class GateMode:
    """What the gates shall do in one forward pass. All None: thresholded decisions, as at inference."""

    noise_seeds: list[int] | None = None
    """Relaxed decisions; one seed for each sequence of the batch, so that noise belongs to the sample."""
    neuron_multiplier: float | None = None
    """Plain attention with the borrowed neuron scaled by this (eq. 13): the zero-out stage."""
    fixed_ratio: float | None = None
    """Compression ratio of fixed decisions in this pass, >= 1; None: the configuration's target."""
    compressed_heads: tuple[tuple[int, int], ...] | None = None
    """Layer and KV head of those that merge (or drop) every token they can, where all others append all; None: the
    gates decide. Not for layers whose heads are spread over ranks."""


@dataclass
class GateOutput:
    """What one layer's gate says about the tokens of one forward pass."""

    query: Tensor
    """Unrotated queries without the borrowed neuron, [B, H_q, T, D]."""
    key: Tensor
    """Unrotated keys without the borrowed neuron, [B, H, T, D]."""
    logits: Tensor
    """Decision logits before noise, > 0 merges (or drops), float32 [B, H, T]; infinite where decisions are fixed."""
    alpha: Tensor
    """Decisions: in [0, 1] when relaxed, 0 or 1 when thresholded; 0 where a sequence starts, float32 [B, H, T]."""
    log_append: Tensor
    """log(1 - alpha), from the noised logit, float32 [B, H, T]."""
    omega: Tensor
    """Importance > 0 of each token, float32 [B, H, T]."""


@dataclass
class DecidedTokens:
    """New tokens as a cache takes them, their decisions thresholded; the first of a sequence is always appended."""

    query: Tensor
    """Unrotated, [B, H_q, T, D]; the borrowed neuron is removed by the cache's tables of RoPE."""
    key: Tensor
    """Unrotated, [B, H, T, D], likewise."""
    value: Tensor
    """[B, H, T, D]."""
    merged: Tensor
    """Whether each token is merged (or dropped), bool [B, H, T]; of fixed decisions the cache knows."""
    omega: Tensor
    """Importance > 0 of each token, float32 [B, H, T]."""


class GateTrace:
    """Decisions of one forward pass by layer index: those of the first pass, for a loss is made of them.

    What activation checkpointing computes again is not kept: it would hold each recomputed layer until the end.
    Not a dataclass: FSDP2 copies the dataclasses among a layer's arguments, and what the copy records would be lost.

    Args:
        ranks: who shares the heads of a layer; stacked decisions are those of all.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self.alpha: dict[int, Tensor] = {}
        self.logits: dict[int, Tensor] = {}

    def record(self, layer_index: int, gated: GateOutput) -> None:
        """Keep what layer `layer_index` decided first."""
        self.alpha.setdefault(layer_index, gated.alpha)
        self.logits.setdefault(layer_index, gated.logits)

    def stacked_alpha(self) -> Tensor:
        """Decisions of all layers and heads, [L, B, H, T]."""
        return self._stacked(self.alpha)

    def stacked_logits(self) -> Tensor:
        """Decision logits of all layers and heads, [L, B, H, T]."""
        return self._stacked(self.logits)

    def _stacked(self, of_layers: dict[int, Tensor]) -> Tensor:
        return self.ranks.join(torch.stack([of_layers[index] for index in sorted(of_layers)]), dim=2)


class CompressedCache(Protocol):
    """What an attention layer needs of a cache: the runtime implements it, the models only call it."""

    def attend(self, layer_index: int, tokens: DecidedTokens, scaling: float, attention_mask: Tensor | None) -> Tensor:
        """Store the new tokens as their gates decided and attend to what is then visible.

        Args:
            layer_index: which layer's part of the cache.
            tokens: the new tokens.
            scaling: factor on the scores.
            attention_mask: True at real tokens, [B, past + T], or None when there is no padding.
        Returns:
            Attention output [B, H_q, T, D].
        """
        ...
