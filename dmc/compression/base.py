"""Types of the learned method: its configuration, gate outputs, the trace that losses read, a cache's interface.

Shape legend, used everywhere in `dmc`:

    B batch | L layers | H KV heads | H_q query heads = H * group | T time (tokens) | D head_dim
    query [B, H_q, T, D], key and value [B, H, T, D], one number per KV head and token [B, H, T].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import Field, StrictBool, StrictFloat, StrictInt
from torch import Tensor

from dmc.budget import check_ratio
from dmc.compression.relaxation import DecisionNoise
from dmc.config.settings import Count, NonNegative, build_config, checked_dataclass
from dmc.ranks import ALONE, Ranks


@checked_dataclass(frozen=True)
class CompressionConfig:
    """Settings of the gates: algorithm and constants of Dynamic Memory Compression (DMC, arXiv:2403.09636).

    `action` and `delay` choose the method: merging at once is DMC, dropping later is DMS (2506.05345). `decisions` and
    `weighting` are the paper's ablations. Token t of a KV head has a decision logit and an importance, here from the
    borrowed channel e* before RoPE:

        a_t = decision_scale * k_t[e*] - decision_offset
        omega_t = sigmoid(mean over the group of q_t[e*] + omega_offset) + eps

    At inference a token is merged (or dropped) if a_t > 0. In training alpha_t = sigmoid((a_t + G1 - G2) /
    temperature), with G1 and G2 from Gumbel(0, 1).

    Raises:
        ValueError: a value is out of range, a delay is missing, or fixed decisions are to drop or to weigh tokens.
    """

    action: Literal["merge", "drop"] = "merge"
    """What happens to a token whose decision is 1: merged into the slot before it, or dropped."""
    decisions: Literal["per_head", "per_layer", "fixed"] = "per_head"
    """Who decides. per_head: each KV head; per_layer: all heads of a layer together, by the mean of their logits
    (DMC-HardC); fixed: the token's position alone, in groups of `target_ratio` tokens (Fixed Memory Pooling)."""
    gate_input: Literal["neuron", "hidden", "both", "query"] = "neuron"
    """Source of importance and decision. neuron: a borrowed channel of query and key, with no new parameter;
    hidden: a linear adapter on the layer's input, attention keeps all channels; both: the sum of the two; query: a
    decision from a channel of each group's first query head, which loses it, and equal importance. With normalized keys
    (Qwen3) a borrowed channel shrinks the others: take hidden, or query with a large `decision_scale`."""
    decided_token: Literal["own", "previous"] = "own"
    """Token that each token's logit decides about: itself, or the token before it (needs a delay)."""
    weighting: Literal["learned", "uniform"] = "learned"
    """Weight of a token in the average it is merged into: omega as read (learned), or 1 (uniform)."""
    delay: NonNegative = 0
    """Tokens a decision waits before it is executed; until then the token stays raw."""
    window_size: Count | None = 12
    """Most tokens that one merged slot averages; None: its whole segment (exact accumulation)."""
    neuron_index: StrictInt = -1
    """Channel of query and key that carries importance and decision. Channels count in the order in which i rotates
    with i + D/2. The last one has RoPE's lowest frequency, or does not rotate where only some channels do."""
    decision_offset: StrictFloat = 5.0
    """Subtracted from the decision neuron; an export calibrates it until the thresholded ratio meets the target."""
    decision_scale: Annotated[StrictFloat, Field(gt=0, le=1e6)] = 1.0
    """Factor on the decision neuron: under Adam, the learning rate of the rows that decide over that of all others."""
    omega_offset: StrictFloat = 5.0
    """Added to the importance logit, the group mean of the query neurons."""
    eps: Annotated[StrictFloat, Field(gt=0, le=1)] = 2**-7
    """Added to the importance, which it keeps positive, in training and at inference."""
    temperature: Annotated[StrictFloat, Field(gt=0, le=1e3)] = 0.1
    """Temperature of the Gumbel-sigmoid relaxation in training."""
    noise: StrictBool = True
    """Whether decisions are sampled in training; False: alpha = sigmoid(logit / temperature), a soft write gate (WG-KV,
    arXiv:2512.17452)."""
    target_counts: Literal["held", "decided"] = "held"
    """What the target counts. held: tokens over the entries in the cache at the end, the last `delay` tokens included;
    decided: tokens over those that no decision merges or drops, executed or not, as DMS counts its 8x. The two
    approach each other as a text grows."""
    target_ratio: StrictFloat = 4.0
    """Compression ratio the model is trained for, >= 1; fixed decisions have exactly this one."""

    def __post_init__(self) -> None:
        if self.action == "drop" and self.delay < 1:
            raise ValueError("action='drop' needs delay >= 1: a token dropped at once would never be seen")
        if self.decided_token == "previous" and (self.delay < 1 or self.decisions == "fixed"):
            raise ValueError(
                "decided_token='previous' needs delay >= 1 and learned decisions: the next token decides about each "
                "token"
            )
        if self.decisions == "fixed" and self.gate_input != "neuron":
            raise ValueError(f"decisions='fixed' reads nothing: gate_input={self.gate_input!r} would have no effect")
        if self.decisions == "fixed" and self.action == "drop":
            raise ValueError(
                "decisions='fixed' pools tokens by their position: it cannot drop them; use action='merge'"
            )
        if self.decisions == "fixed" and self.weighting == "learned":
            raise ValueError(
                "decisions='fixed' borrows no neuron that carries a token's importance: use weighting='uniform'"
            )
        check_ratio(self.target_ratio, "target_ratio")

    @property
    def borrows_neuron(self) -> bool:
        """Whether attention loses a channel, of query and key or, with `gate_input="query"`, of some query heads."""
        return self.decisions != "fixed" and self.gate_input != "hidden"

    @property
    def borrows_key_neuron(self) -> bool:
        """Whether that channel is one of query and key, which carries importance and decision."""
        return self.borrows_neuron and self.gate_input != "query"

    def share_of_norm(self, head_dim: int) -> float:
        """Return the share of a normalized key's squared norm in a borrowed channel whose logit has reached 0."""
        return min(1.0, (self.decision_offset / self.decision_scale) ** 2 / head_dim)

    @property
    def counted_delay(self) -> int:
        """Tokens at the end of a sequence that the target counts as held, whatever was decided about them."""
        return self.delay if self.target_counts == "held" else 0

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
        return build_config(cls, values, "compression")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for `config.json`."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class GateMode:
    """How the gates decide in one forward pass; as constructed: by the threshold, as at inference."""

    noise_seeds: list[int] | None = None
    """Seeds of the relaxation noise, one for each sequence of the batch, so that noise belongs to the sample."""
    noise: DecisionNoise | None = None
    """Noise drawn from these seeds for the whole pass; None: a model draws it, a lone layer its own."""
    neuron_multiplier: float | None = None
    """Factor on the borrowed neuron under plain attention (eq. 13), in the zero-out stage."""
    fixed_ratio: float | None = None
    """Compression ratio of fixed decisions in this pass, >= 1; None: the configuration's target."""
    compressed_heads: tuple[tuple[int, int], ...] | None = None
    """(layer, KV head) pairs that merge (or drop) every token they can, while all other heads append; None: the gates
    decide. Not supported where the heads of a layer are sharded."""
    skip_below: float | None = -math.inf
    """Tokens whose log(1 - alpha) is at most this may be left out of attention: -inf, exactly those that no query sees;
    None: none is."""


@dataclass
class GateOutput:
    """Output of one layer's gate for the tokens of one forward pass."""

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
    """New tokens and their thresholded decisions, as a cache takes them; it always appends a sequence's first token."""

    query: Tensor
    """Unrotated queries, [B, H_q, T, D]; the cache's RoPE tables remove the borrowed neuron."""
    key: Tensor
    """Unrotated keys, [B, H, T, D], likewise."""
    value: Tensor
    """Values, [B, H, T, D]."""
    decisions: Tensor
    """Whether each token is merged (or dropped), bool [B, H, T]; the cache makes fixed decisions itself."""
    omega: Tensor
    """Importance > 0 of each token, float32 [B, H, T]."""
    rotates: bool = True
    """Whether the layer rotates queries and keys by their positions."""
    query_scale: Tensor | None = None
    """Factor on rotated queries, [D]; None: 1."""


class GateTrace:
    """Records each layer's decisions in a forward pass, from which the losses are computed.

    Recomputation by activation checkpointing is not recorded: it would keep each recomputed layer alive to the end.
    Not a dataclass: FSDP2 copies the dataclasses among a layer's arguments, and what the copy records would be lost.

    Args:
        ranks: processes that share a layer's heads; stacked decisions are those of all heads.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self.alpha: dict[int, Tensor] = {}
        self.logits: dict[int, Tensor] = {}

    def record(self, layer_index: int, gated: Any) -> None:
        """Record a layer's decisions, its `alpha` and `logits`, the first time only."""
        self.alpha.setdefault(layer_index, gated.alpha)
        self.logits.setdefault(layer_index, gated.logits)

    def stacked_alpha(self) -> Tensor:
        """Decisions of all layers and heads, [L, B, H, T]."""
        return self._stacked(self.alpha)

    def stacked_logits(self) -> Tensor:
        """Decision logits of all layers and heads, [L, B, H, T]."""
        return self._stacked(self.logits)

    def _stacked(self, of_layers: dict[int, Tensor]) -> Tensor:
        return self.ranks.all_gather(torch.stack([of_layers[index] for index in sorted(of_layers)]), dim=2)


RunRecurrent = Callable[[Tensor, Any], Tensor]
"""Forward of a layer without attention: from hidden states, [S, n, hidden], and states of S sequences; as long."""


class CompressedCache(Protocol):
    """Interface of a cache to the attention layers: the runtime implements it, the models call it."""

    def attend(
        self,
        layer_index: int,
        tokens: DecidedTokens,
        scaling: float,
        attention_mask: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store the new tokens as their gates decided, then attend to all visible entries.

        Args:
            layer_index: index of the layer.
            tokens: the new tokens.
            scaling: factor on the scores.
            attention_mask: True at real tokens, [B, past + T], or None when there is no padding.
            sinks: logit of each query head that its softmax counts beside the keys', [H_q]; None: there is none.
        Returns:
            Attention output [B, H_q, T, D].
        """
        ...

    def attend_plain(
        self,
        layer_index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        attention_mask: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store the new tokens of a layer without gates, then attend to all entries, or those in the layer's window.

        Args:
            layer_index: index of the layer.
            query: rotated, [B, H_q, T, D].
            key: rotated, [B, H, T, D].
            value: [B, H, T, D].
            scaling: factor on the scores.
            attention_mask: see `attend`.
            sinks: see `attend`.
        Returns:
            Attention output [B, H_q, T, D].
        """
        ...

    def run_recurrent(
        self, layer_index: int, run: RunRecurrent, hidden_states: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Run a layer without attention on new tokens, from the states of their sequences, which it moves on.

        Args:
            layer_index: index of the layer.
            run: its own forward.
            hidden_states: its input, [B, T, hidden].
            attention_mask: see `attend`.
        Returns:
            Its output, [B, T, hidden].
        """
        ...
