"""Layers without attention: their states, some of each sequence, as the layer's own forward reads and writes them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from dmc.compression.base import RunRecurrent
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.layout import Field

CONV_STATE, RECURRENT_STATE = "conv_state", "recurrent_state"


def state_fields(config: Any, num_layers: int, dtype: torch.dtype) -> tuple[Field, ...]:
    """Declare what the layers without attention of a model keep of each sequence; () where it has none.

    Args:
        config: transformers configuration, with the sizes of its gated delta nets.
        num_layers: number of these layers.
        dtype: of the model.
    """
    if not num_layers:
        return ()
    heads, key_dim, value_dim = (
        config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    )  # fmt: skip
    channels, columns = 2 * config.linear_num_key_heads * key_dim + heads * value_dim, config.linear_conv_kernel_dim - 1
    return (
        Field(CONV_STATE, dtype, "row", (channels, max(columns, 1)), num_layers=num_layers),
        Field(RECURRENT_STATE, torch.float32, "row", (heads, key_dim, value_dim), num_layers=num_layers),
    )


class LayerStates:
    """States of S sequences in one layer, under the names by which transformers' layers ask their cache for them.

    Before 5.23 some are asked of `layers[layer_idx]`, and by the number of a state, of which there is one.

    Args:
        conv: last inputs of the layer's convolution, the newest last, [S, channels, kernel - 1].
        recurrent: float32 [S, H, D_k, D_v].
    """

    record_past = False

    def __init__(self, conv: Tensor, recurrent: Tensor) -> None:
        self.conv, self.recurrent = conv, recurrent

    @property
    def layers(self) -> dict[int, LayerStates]:
        """This, whatever the layer."""
        return defaultdict(lambda: self)

    @property
    def conv_states(self) -> list[Tensor]:
        """See `conv`."""
        return [self.conv]

    @property
    def recurrent_states(self) -> list[Tensor]:
        """See `recurrent`."""
        return [self.recurrent]

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        """Always: before the first token it is 0."""
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Return `conv`, which a layer that is fed one token writes in place."""
        return self.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Return `recurrent`."""
        return self.recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        """Never: no token is taken back."""
        return False

    def update_conv_state(self, inputs: Tensor, layer_idx: int, conv_kernel_size: int | None = None) -> Tensor:
        """Keep the last of the inputs, [S, channels, n], and return those before and these."""
        every = torch.cat((self.conv, inputs), dim=-1)
        self.conv = every[..., -self.conv.shape[-1] :]
        return every

    def update_recurrent_state(self, states: Tensor, layer_idx: int) -> Tensor:
        """Keep the states after the new tokens."""
        self.recurrent = states
        return states


def run_layer(
    run: RunRecurrent, hidden_states: Tensor, batch: ForwardBatch, fields: Any, place: int, writes: bool
) -> Tensor:
    """Run a layer over the new tokens of sequences, from their states on; sequences with equally many run together.

    Args:
        run: the layer's forward, which gets `LayerStates`.
        hidden_states: its input, [T, hidden].
        batch: which tokens of which sequences.
        fields: tensors of the cache by name, [layers, C, ...] those of states.
        place: index of the layer among those without attention.
        writes: whether the states go on to these tokens' end; else they stay.
    Returns:
        [T, hidden].
    """
    conv, recurrent = (fields[name][place] for name in (CONV_STATE, RECURRENT_STATE))
    output = torch.empty_like(hidden_states)
    for part, where in batch.by_equal_count:
        states = LayerStates(conv[part.row_index], recurrent[part.row_index])
        found = run(hidden_states[where].unflatten(0, (len(part.rows), -1)), states)
        output[where] = found.flatten(0, 1)
        if writes:
            conv[part.row_index], recurrent[part.row_index] = states.conv, states.recurrent
    return output
