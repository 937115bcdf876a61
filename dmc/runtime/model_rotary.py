"""How a stock model turns queries and keys by their positions, found by what its layers do with two alike tokens."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from dmc.compression import full_attention_tables
from dmc.compression.base import RunRecurrent
from dmc.runtime.paged_cache import PagedCache
from dmc.runtime.paged_forward import PagedForward

DISTANCE = 7
"""Positions between the two tokens that are compared."""
PROJECTIONS = ("q_proj", "qkv_proj")
"""What an attention layer has, and other layers have not."""
NORMS = ("query_layernorm", "key_layernorm")
"""Norms behind RoPE of some families, whose weights do not commute with it."""


@dataclass(frozen=True)
class Turn:
    """How one layer turns; of a candidate, how it may.

    Args:
        apply: the family's `apply_rotary_pos_emb`; None: the layer turns nothing.
        tables: position ids [S, n] -> cos, sin [S, n, R], float32.
        weights: factors on turned queries and on turned keys, [D]; None: there are none.
    """

    apply: Callable[..., Any] | None = None
    tables: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    weights: tuple[Tensor, Tensor] | None = None

    def __call__(self, states: Tensor, positions: Tensor, which: int) -> Tensor:
        """Turn queries (which=0) or keys (1), [S, heads, n, D], further by positions [S, n]; float32."""
        states = states.float()
        if self.apply is None or self.tables is None:
            return states
        weight = None if self.weights is None else self.weights[which].float()
        states = states if weight is None else states / weight
        turned: Tensor = self.apply(states[:, :1], states, *self.tables(positions))[1]
        return turned if weight is None else turned * weight


class ModelRotary:
    """Turns what the layers without a window keep to other positions; see `dmc.policies.layer_attention.Rotary`.

    Args:
        turns: of each of these layers.
    """

    def __init__(self, turns: list[Turn]) -> None:
        self._turns = turns

    def turn_queries(self, layer_index: int, query: Tensor, positions: Tensor) -> Tensor:
        """See `Rotary`."""
        return self._turns[layer_index](query, positions, 0)

    def turn_keys(self, layer_index: int, key: Tensor, positions: Tensor) -> Tensor:
        """See `Rotary`."""
        return self._turns[layer_index](key, positions, 1)


class TwoPositions(PagedForward):
    """Stands in for a pass: attention gives nothing, so that alike tokens stay alike in all layers.

    Args:
        cache: the engine's; nothing is written.
    """

    serves_whole_layers = False

    def __init__(self, cache: PagedCache) -> None:
        self.cache, self._num_attended = cache, 0
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}
        """Queries and keys of each layer, [1, heads, T, D]."""

    @override
    def attend_plain(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        self._check_plain(layer_index, query, key, value)
        self.seen[layer_index] = query, key
        return torch.zeros_like(query)

    @override
    def run_recurrent(self, layer_index: int, run: RunRecurrent, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        self._take_turn(layer_index)
        return torch.zeros_like(hidden_states)


@torch.no_grad()
def try_out(view: Any, cache: PagedCache) -> TwoPositions:
    """Run a stock model over three tokens at two positions each, to see that the cache serves its layers, and how.

    Args:
        view: of a stock model, that attends through the keyword `paged_cache`.
        cache: the engine's.
    Raises:
        NotImplementedError: a layer attends in a way of its own.
    """
    forward, size, device = TwoPositions(cache), view.get_input_embeddings().num_embeddings, cache.layout.device
    tokens = torch.tensor([size // 4, size // 2, size - 1 - size // 4], device=device).repeat(2)
    positions = torch.tensor([0, DISTANCE], device=device).repeat_interleave(3)
    asked = {"position_ids": positions[None], "paged_cache": forward, "use_cache": False, "logits_to_keep": 1}
    view(tokens[None], **asked)
    forward.finish()
    return forward


def rotary_of(model: Any, tried: TwoPositions) -> ModelRotary:
    """Find how each layer of a stock model without a window turns, by what it did at two positions.

    Raises:
        NotImplementedError: a layer turns in no way that is known here.
    """
    attentions = {
        int(module.layer_idx): module
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int) and any(hasattr(module, name) for name in PROJECTIONS)
    }
    layout = tried.cache.layout
    full = [index for index in sorted(tried.seen) if layout.window_of(layout.places[index]) is None]
    return ModelRotary([_turn_of(model, attentions.get(index), index, *tried.seen[index]) for index in full])


@torch.no_grad()
def _turn_of(model: Any, attention: nn.Module | None, index: int, query: Tensor, key: Tensor) -> Turn:
    """Choose the candidate that turns what a layer gives at the first position into what it gives at the second."""
    positions = torch.full((1, 3), DISTANCE, device=query.device)

    def error(turn: Turn) -> float:
        parts = []
        for which, states in enumerate((query, key)):
            at_first, at_second = states.float().chunk(2, 2)
            apart = turn(at_first, positions, which) - at_second
            parts.append(float(apart.norm() / at_second.norm().clamp_min(1e-12)))
        return max(parts)

    candidates = [*_candidates(model, attention)]
    errors = [error(turn) for turn in candidates]
    best = min(range(len(errors)), key=errors.__getitem__)
    if not errors[best] <= 1e-3 + 8 * torch.finfo(query.dtype).eps:
        raise NotImplementedError(
            f"the policy rotates queries and keys, and layer {index} of this {model.config.model_type} model does not "
            "use its family's apply_rotary_pos_emb: use another policy, such as SnapKV or Quest"
        )
    return candidates[best]


def _candidates(model: Any, attention: nn.Module | None) -> Iterator[Turn]:
    """Yield how a layer may turn: by RoPE with each of the model's tables, with and without weights; or not."""
    rotary = next((module for name, module in model.named_modules() if name.endswith("rotary_emb")), None)
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    norms = [getattr(attention, name, None) for name in NORMS]
    weights = [None, None if None in norms else tuple(norm.weight for norm in norms if norm is not None)]
    if rotary is not None and apply is not None:
        kinds = [name.removesuffix("_inv_freq") for name, _ in rotary.named_buffers() if name.endswith("_inv_freq")]
        kinds = [kind for kind in kinds if hasattr(rotary, f"{kind}_attention_scaling")]
        for kind, weight in itertools.product(kinds or [None], dict.fromkeys(weights)):
            yield Turn(apply, _tables(rotary, kind), weight)
    yield Turn()


def _tables(rotary: Any, kind: str | None) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return a model's own tables of one kind of layers, without the factor of YaRN."""
    scale = rotary.attention_scaling if kind is None else getattr(rotary, f"{kind}_attention_scaling")

    def tables(positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = full_attention_tables(rotary, torch.zeros((), device=positions.device), positions, kind)
        return cos / scale, sin / scale

    return tables
