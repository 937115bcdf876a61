"""Gates that see the hidden state: an affine map from a layer's input to decision and importance."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

OF_ADAPTERS = ".gate_adapter."
"""Part of the name of every weight of a model's adapters."""


class GateAdapter(nn.Linear):
    """Two rows for each KV head, decision and importance, side by side so that the heads can be cut.

    Zero at first, unless sensitivity_init sets it: every decision logit is then -c and all tokens weigh the same, as
    with a removed neuron.

    Args:
        hidden_size: channels of the layer's input.
        kv_heads: H.
    """

    def __init__(self, hidden_size: int, kv_heads: int) -> None:
        super().__init__(hidden_size, 2 * kv_heads)

    def reset_parameters(self) -> None:
        """Set all weights to zero."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map [..., hidden] in float32 whatever the model's dtype: a scale would magnify what 16 bits round off."""
        dtype, device = torch.promote_types(self.weight.dtype, torch.float32), hidden_states.device.type
        with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
            return F.linear(hidden_states.to(dtype), self.weight.to(dtype), self.bias.to(dtype))

    @property
    def decision_rows(self) -> slice:
        """Rows of weight and bias that decide, one for each KV head."""
        return slice(0, None, 2)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Map [B, T, hidden] to decision and importance logits, [B, 2, H, T].

        Not `forward`, whose output tensor parallelism takes to be cut along its last dimension.
        """
        return self(hidden_states).unflatten(-1, (-1, 2)).permute(0, 3, 2, 1)
