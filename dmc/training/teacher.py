"""The frozen model whose next-token distributions a retrofit may learn from."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Teacher:
    """A frozen causal LM; no module, so that no optimizer and no checkpoint knows of its weights.

    Args:
        model: stock or compressed causal LM, in any mode.
        path: where its weights are.
        temperature: both distributions are softened by it.
    """

    def __init__(self, model: Any, path: str, temperature: float) -> None:
        self.model, self.path, self.temperature = model.eval().requires_grad_(False), path, temperature

    def loss(self, logits: Tensor, input_ids: Tensor) -> Tensor:
        """Forward KL divergence from the teacher's next-token distributions, see `divergence`; input_ids [B, T]."""
        with torch.no_grad():
            taught = self.model(input_ids, use_cache=False).logits
        return divergence(taught, logits, self.temperature)


def divergence(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """Mean over tokens of t^2 * KL(softmax(teacher / t) || softmax(student / t)), in nats; both [B, T, vocab]."""
    expected = F.log_softmax(teacher.float() / temperature, dim=-1).flatten(0, 1)
    got = F.log_softmax(student.float() / temperature, dim=-1).flatten(0, 1)
    return temperature**2 * F.kl_div(got, expected, reduction="batchmean", log_target=True)
