"""The frozen model whose next-token distributions a retrofit may learn from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dmc.models import with_token_losses
from dmc.models.modeling import for_unpadded
from dmc.models.token_losses import Taught


class Teacher:
    """A frozen causal LM; no module, so that no optimizer and no checkpoint knows of its weights.

    Args:
        model: stock or compressed causal LM, in any mode.
        path: where its weights are.
        temperature: its distributions, and those of who learns from it, are softened by it.
    """

    def __init__(self, model: Any, path: str, temperature: float) -> None:
        self.model = for_unpadded(with_token_losses(model)).eval().requires_grad_(False)
        self.path, self.temperature = path, temperature

    def read(self, input_ids: Tensor) -> Taught:
        """Read tokens, [B, T]; no logits are made before the loss of who learns asks for some."""
        with torch.no_grad():
            states = self.model(input_ids, use_cache=False, skip_logits=True).last_hidden_state
        # FSDP2 leaves the weights outside the layers gathered after a forward.
        return Taught(states, self.model.lm_head.weight, self.temperature)
