"""The gate: reads decision and importance from the borrowed neuron, pools merged tokens and biases the attention."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from dmc.compression.accumulate import accumulate
from dmc.compression.base import CompressionConfig, DecidedTokens, GateMode, GateOutput
from dmc.compression.relaxation import DecisionNoise, hard_decisions, log_one_minus_sigmoid, sample_decisions
from dmc.compression.rotary import leader_scale, neuron_scale
from dmc.ranks import ALONE, Ranks


class Compressor:
    """One layer's learned compression (DMC, arXiv:2403.09636; delayed forms, algorithms of DMS 2506.05345).

    Holds no parameters: the borrowed neuron e* of the key projection carries the decision logit a_t = s k_t[e*] - c,
    that of the query projections the importance omega_t = sigmoid(mean over the group of q_t[e*] + c) + eps. Decisions
    per layer (DMC-HardC) take the mean of a_t over the KV heads, and of q_t[e*] over all query heads, for all of them.

    With an adapter its outputs are added to both, or stand alone and no neuron is borrowed (`gate_input`). Fixed
    decisions borrow none either, and omega is 1. Queries and keys then stay as they are. With `gate_input="query"` a_t
    is s q_t[e*] - c of the group's first query head, which alone loses e*, before and after RoPE.

    Args:
        config: settings of the gates.
        head_dim: D.
        ranks: processes that share the layer's heads.
    Raises:
        ValueError: the head is too small to lend a neuron, or has no such neuron.
    """

    def __init__(self, config: CompressionConfig, head_dim: int, ranks: Ranks = ALONE) -> None:
        if head_dim < 4:
            raise ValueError(f"head_dim={head_dim} is too small for a borrowed neuron: expected at least 4 channels")
        if not -head_dim <= config.neuron_index < head_dim:
            raise ValueError(f"neuron_index={config.neuron_index} does not exist in heads of {head_dim} channels")
        self.config = config
        self.head_dim = head_dim
        self.ranks = ranks
        self.neuron = config.neuron_index % head_dim if config.borrows_key_neuron else None

    def neuron_scale(self, multiplier: float, like: Tensor) -> Tensor:
        """Return the vector [D] that scales the borrowed neuron by `multiplier`; all ones where none is borrowed."""
        return neuron_scale(self.head_dim, self.neuron, multiplier, like)

    def without_decision(self, query: Tensor, kv_heads: int, multiplier: float = 0.0) -> Tensor:
        """Scale the decision channel of each group's first query head, [B, H_q, T, D], with `gate_input="query"`."""
        if self.config.gate_input != "query":
            return query
        index = self.config.neuron_index
        return query * leader_scale(query.shape[1], self.head_dim, kv_heads, index, query, multiplier)[:, None]

    def phase_out(self, query: Tensor, key: Tensor, multiplier: float, channel: int) -> tuple[Tensor, Tensor]:
        """Scale the borrowed channels of projected queries and keys, [B, T, heads, D], by `multiplier` (eq. 13).

        Before any norm of the heads, for the channel is part of that: 0 is then the same as zeroed rows of the weights.
        It is `channel` of the projections, which need not be in the order of `neuron_index`.
        """
        if self.neuron is not None:
            scale = neuron_scale(self.head_dim, channel, multiplier, key)
            return query * scale, key * scale
        if self.config.gate_input != "query":
            return query, key
        return query * leader_scale(query.shape[2], self.head_dim, key.shape[2], channel, query, multiplier), key

    def gate(
        self,
        query: Tensor,
        key: Tensor,
        mode: GateMode | None,
        layer_index: int,
        starts: Tensor | None = None,
        adapted: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> GateOutput:
        """Decide for every token and remove the borrowed neuron.

        Args:
            query: unrotated, [B, H_q, T, D].
            key: unrotated, [B, H, T, D].
            mode: thresholded or relaxed with the sample's seeds; None: relaxed with torch's default generator.
            layer_index: index of the layer, part of the noise's seed.
            starts: True at the first token of a sequence or document, which is always appended, [B, T]; None: the cache
                that stores the tokens knows the starts, and makes fixed decisions itself.
            adapted: output of the layer's adapter, decision and importance, [B, 2, H, T]; None: no adapter.
            noise: of relaxed decisions, float32 [B, H, T]; None: the pass's, or drawn here.
        """
        if self.config.decisions == "fixed":
            return self._gate_by_position(query, key, mode, starts)
        logits, importance = self._read(query, key, adapted)
        if self.config.decided_token == "previous":
            logits = torch.nn.functional.pad(logits[..., 1:], (0, 1), value=-torch.inf)
        if mode is not None and mode.compressed_heads is not None:
            logits = torch.full_like(logits, -torch.inf)
            for layer, head in mode.compressed_heads:
                if layer == layer_index:
                    logits[:, head] = torch.inf
        if mode is not None and mode.noise_seeds is None:
            alpha = hard_decisions(logits).float()
            log_append = hard_log_append(alpha)
        else:
            if self.config.noise:
                if mode is not None and noise is None:
                    mode = self.with_noise(
                        mode, [layer_index], key.shape[1] * self.ranks.size, key.shape[2], key.device
                    )
                    noise = None if mode.noise is None else mode.noise.of_layer(layer_index)
                alpha, noised = sample_decisions(logits, self.config.temperature, noise=noise)
            else:
                noised = logits / self.config.temperature
                alpha = torch.sigmoid(noised)
            log_append = log_one_minus_sigmoid(noised)
        if starts is not None:
            alpha = alpha.masked_fill(starts[:, None], 0.0)
            log_append = log_append.masked_fill(starts[:, None], 0.0)
        omega = self._omega(importance)
        if self.neuron is not None:
            scale = self.neuron_scale(0.0, key)
            query, key = query * scale, key * scale
        query = self.without_decision(query, key.shape[1])
        of_heads = (values.expand(key.shape[:-1]) for values in (logits, alpha, log_append, omega))
        return GateOutput(query, key, *of_heads)

    def with_noise(
        self, mode: GateMode, layers: Sequence[int], kv_heads: int, length: int, device: torch.device
    ) -> GateMode:
        """Draw the noise of a pass, where its decisions are relaxed and it has none yet.

        Args:
            mode: with the samples' seeds.
            layers: indices of the layers that decide alike.
            kv_heads: of a layer, over all ranks.
            length: tokens of a sequence.
            device: of the logits.
        """
        config = self.config
        if mode.noise_seeds is None or mode.noise is not None or config.decisions == "fixed" or not config.noise:
            return mode
        alone = config.decisions == "per_layer"  # one draw, the same on every rank
        ranks, heads = (ALONE, 1) if alone else (self.ranks, kv_heads)
        noise = DecisionNoise(mode.noise_seeds, layers, heads, length, device, ranks)
        return dataclasses.replace(mode, noise=noise)

    def decide(self, query: Tensor, key: Tensor, value: Tensor, adapted: Tensor | None = None) -> DecidedTokens:
        """Threshold the decisions for a cache, see `gate`; the cache makes fixed decisions itself."""
        heads = key.shape[:-1]
        if self.config.decisions == "fixed":
            decisions = torch.zeros(heads, dtype=torch.bool, device=key.device)
            return DecidedTokens(query, key, value, decisions, torch.ones(heads, device=key.device))
        logits, importance = self._read(query, key, adapted)
        decisions, omega = hard_decisions(logits), self._omega(importance)
        query = self.without_decision(query, key.shape[1])
        return DecidedTokens(query, key, value, decisions.expand(heads), omega.expand(heads))

    def _omega(self, importance: Tensor) -> Tensor:
        if self.config.weighting == "uniform":
            return torch.ones_like(importance)
        return torch.sigmoid(importance + self.config.omega_offset) + self.config.eps

    def _read(self, query: Tensor, key: Tensor, adapted: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return decision and importance logits, float32 [B, H, T], or [B, 1, T] where a layer decides as one."""
        batch, kv_heads, length = key.shape[:3]
        read = []
        if self.neuron is not None:
            importance = query[..., self.neuron].float().view(batch, kv_heads, -1, length).mean(2)
            read.append((key[..., self.neuron].float(), importance))
        if self.config.gate_input == "query":
            decision = query[:, :: query.shape[1] // kv_heads, :, self.config.neuron_index].float()
            read.append((decision, torch.zeros_like(decision)))
        if adapted is not None:
            read.append((adapted[:, 0].float(), adapted[:, 1].float()))
        decision, importance = (functools.reduce(torch.add, logits) for logits in zip(*read, strict=True))
        if self.config.decision_scale != 1:
            decision = self.config.decision_scale * decision
        logits = decision - self.config.decision_offset
        if self.config.decisions == "per_layer":
            both = self.ranks.all_reduce(torch.stack((logits, importance)).mean(2, keepdim=True)) / self.ranks.size
            logits, importance = both.unbind()
        return logits, importance

    def _gate_by_position(self, query: Tensor, key: Tensor, mode: GateMode | None, starts: Tensor | None) -> GateOutput:
        """Fixed decisions of whole sequences (Fixed Memory Pooling): nothing is read, relaxed or removed."""
        alpha = key.new_zeros(key.shape[:-1], dtype=torch.float32)
        if starts is not None:
            ratio = None if mode is None else mode.fixed_ratio
            decisions = fixed_decisions(positions_since(starts), ratio or self.config.target_ratio)
            alpha = decisions.float()[:, None].expand_as(alpha)
        return GateOutput(query, key, torch.logit(alpha), alpha, hard_log_append(alpha), torch.ones_like(alpha))

    def pool(self, gated: GateOutput, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return a merge gate's stream: the running average of the segment after each token, in `value`'s dtype.

        Keys are pooled before RoPE and rotated at the position of the last token merged. A drop gate pools nothing.

        Args:
            gated: output of `gate`.
            value: values, [B, H, T, D].
        Returns:
            Keys (not rotated yet) and values, [B, H, T, D].
        """
        if self.config.action == "drop":
            return gated.key, value
        states = torch.cat((gated.key, value), dim=-1)
        pooled = accumulate(states, gated.alpha, gated.omega, self.config.window_size).to(value.dtype)
        key, value = pooled.split(self.head_dim, dim=-1)
        return key, value

    def log_keep(self, gated: GateOutput) -> Tensor:
        """Return the attention bias of each stream entry for later queries, [B, H, T].

        merge: log(1 - alpha_{t+1}), for the state after t is overwritten if the next token merges into it.
        drop: log(1 - alpha_t).
        """
        if self.config.action == "drop":
            return gated.log_append
        return torch.cat((gated.log_append[..., 1:], torch.zeros_like(gated.log_append[..., :1])), dim=-1)


def hard_log_append(alpha: Tensor) -> Tensor:
    """Return log(1 - alpha), 0 or -inf, of decisions that are 0 or 1; any shape, float32 as `alpha`."""
    return torch.zeros_like(alpha).masked_fill(alpha > 0, -torch.inf)


def fixed_decisions(positions: Tensor, ratio: float) -> Tensor:
    """Return whether each token is merged under Fixed Memory Pooling (a baseline of DMC, arXiv:2403.09636).

    alpha_t = 0 if t = 0 or floor(t / CR) != floor((t - 1) / CR), else 1: CR 4 gives 0111 0111, CR 2.5 gives 0110101101.

    Args:
        positions: position t of each token in its sequence or document, int64, any shape.
        ratio: compression ratio CR >= 1, an integer or not.
    Returns:
        bool, shape of `positions`.
    """
    places = positions.double()  # in float32 two devices may round a position at a group's border differently
    return (positions > 0) & (torch.floor(places / ratio) == torch.floor((places - 1) / ratio))


def positions_since(starts: Tensor) -> Tensor:
    """Count tokens from the last start on, 0 at a start; True at starts, bool [B, T] -> int64 [B, T]."""
    places = torch.arange(starts.shape[-1], device=starts.device).expand(starts.shape)
    return places - places.where(starts, 0).cummax(-1).values
